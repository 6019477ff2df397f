"""Step time and accepted length as functions of γ, and the recommended γ.

Recomputes the article's advice on the draft length. Every additional drafted token makes a step
longer, while the accepted length grows more and more slowly, so the speed has a maximum. The advice
is to draft about one token more than are accepted on average (about 4 if 3 of 10 are accepted).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwise.benchmark.style import look
from draftwise.core.draft_length import advised_draft_length, expected_accepted
from draftwise.studies.drawing import count_on, panels, styled
from draftwise.studies.study import LAW, Data, Description, Finding, Study
from draftwise.studies.sustained import begin, compete, summary
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)


def figures_of(rows: dict[str, Any]) -> dict[str, Any]:
    """Figures by γ, each with the length that the article's rule recommends from it."""
    figures = {"0": _row(rows["none"], 0)}
    for length in _LENGTHS:
        figures[str(length)] = _row(rows[f"fixed:{length}"], length)
    return figures


def _row(own: dict[str, Any], length: int) -> dict[str, Any]:
    accepted = own["tokens_per_request_step"] - 1
    return {
        "ratio": own["ratio"],
        "standard_error": own["standard_error"],
        "step_ms": own["step_ms"],
        "tokens_per_step": own["tokens_per_request_step"],
        "advised": advised_draft_length(max(0.0, min(accepted, length)), length) if length else 0,
    }


class Gamma(Study):
    """Step time and accepted length as functions of γ."""

    name = "gamma"
    title = "How long a draft should be"
    source = f"the article on speculative decoding, after {LAW}"
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure all lengths in interleaved turns, at the smallest and the largest batch size."""
        s = bench.settings
        contenders = bench.contenders(["none", *(f"fixed:{n}" for n in _LENGTHS)])
        batches = {}
        for size in sorted({min(s.batch_sizes), max(s.batch_sizes)}):
            bench.status(f"batch {size}")
            begin(contenders, bench.prompts, bench.sampling, size)
            compete(contenders, s.rounds, s.turn, s.warm_up_steps, 5)
            batches[str(size)] = figures_of(summary(contenders))
        return {"batches": batches}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw step time, accepted length and speed."""
        figure, axes = panels(3, width=3.6)
        for number, (size, rows) in enumerate(data["batches"].items()):
            lengths = [int(length) for length in rows]
            for panel, key in zip(axes, ("step_ms", "tokens_per_step", "ratio"), strict=True):
                values = [row[key] for row in rows.values()]
                if key == "step_ms":
                    values = [value / values[0] for value in values]
                panel.plot(lengths, values, label=f"batch {size}", **look(number))
        for panel, label in zip(
            axes,
            (
                "time of a step, × γ = 0",
                "tokens per request and step",
                "tokens per second, × target only",
            ),
            strict=True,
        ):
            panel.set_xlabel("γ, drafted tokens")
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
            count_on(panel.xaxis)
        axes[0].legend(frameon=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the best and the recommended γ."""
        findings, said = [], []
        grows, fades, advice = [], [], []
        for size, rows in data["batches"].items():
            best = max(rows, key=lambda length: rows[length]["ratio"])
            advised = rows["5"]["advised"]
            nearest = min(rows, key=lambda length: (abs(int(length) - advised), int(length)))
            reached = rows[nearest]["ratio"] / rows[best]["ratio"]
            alpha = _acceptance(rows["1"]["tokens_per_step"] - 1)
            expected = 1 + expected_accepted(alpha, _LENGTHS[-1])
            said.append(
                f"batch {size}: the best γ is {best}, with {rows[best]['ratio']:.2f} times the "
                f"speed of target-only decoding; the rule applied at γ = 5 recommends {advised}, "
                f"which reaches {reached:.0%} of that speed"
            )
            longest = rows[str(_LENGTHS[-1])]
            grows.append(longest["step_ms"] > rows["0"]["step_ms"])
            first = rows["1"]["tokens_per_step"] - 1
            last = (longest["tokens_per_step"] - rows["5"]["tokens_per_step"]) / (_LENGTHS[-1] - 5)
            fades.append(last < 0.5 * first)
            advice.append(reached > 0.95)
            if size == next(iter(data["batches"])):
                said.append(
                    "if every token were accepted independently with the probability of the first "
                    f"token, a step would gain {expected:.2f} tokens at γ = {_LENGTHS[-1]}; it "
                    f"gains {longest['tokens_per_step']:.2f}"
                )
        findings = [
            Finding.of(
                "Step time grows with γ, and the accepted length grows more and more slowly.",
                "; ".join(
                    f"batch {size}: a step at γ = {_LENGTHS[-1]} takes "
                    f"{r[str(_LENGTHS[-1])]['step_ms'] / r['0']['step_ms']:.2f} times the time at "
                    f"γ = 0, and steps at γ = 1, 5 and {_LENGTHS[-1]} gain "
                    f"{r['1']['tokens_per_step']:.2f}, {r['5']['tokens_per_step']:.2f} and "
                    f"{r[str(_LENGTHS[-1])]['tokens_per_step']:.2f} tokens"
                    for size, r in data["batches"].items()
                ),
                [*grows, *fades],
            ),
            Finding.of(
                "The best length is about one token more than are accepted on average.",
                "; ".join(said[:1] + said[2:] if len(said) > 2 else said[:1]),
                advice,
            ),
        ]
        text = "; ".join(said)
        return Description(f"{text[0].upper()}{text[1:]}.", findings)


def _acceptance(first: float) -> float:
    return min(max(first, 0.0), 1.0)
