"""How step time and accepted length grow with γ, and which γ is advised.

Recomputes the article's advice on the draft length: a step takes longer with every token drafted,
while the accepted length grows ever less, so that speed has a maximum; and one should draft about
one token more than is accepted on average (3 accepted of 10 drafted say about 4).
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftwise.benchmark.style import look
from draftwise.core.goodput import advised_draft_length, expected_accepted
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import LAW, Account, Data, Finding, Study
from draftwise.studies.sustained import begin, compete, summary
from draftwise.studies.workbench import Workbench

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)


def figures_of(rows: dict[str, Any]) -> dict[str, Any]:
    """Figures by γ from the summary of turns, with what each would advise."""
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
    """Step time and accepted length over γ."""

    name = "gamma"
    title = "How long a draft should be"
    source = f"the article on speculative decoding, after {LAW}"
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Every length in turns, at the smallest and the largest batch size."""
        s = bench.settings
        everybody = bench.contenders(["none", *(f"fixed:{n}" for n in _LENGTHS)])
        batches = {}
        for size in sorted({min(s.batch_sizes), max(s.batch_sizes)}):
            bench.status(f"batch {size}")
            begin(everybody, bench.prompts, bench.sampling, size)
            compete(everybody, s.rounds, s.turn, s.warm_up_steps, 5)
            batches[str(size)] = figures_of(summary(everybody))
        return {"batches": batches}

    @styled
    def draw(self, data: Data) -> Figure:
        """Step time, accepted length, speed."""
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
                "tokens per second, × target alone",
            ),
            strict=True,
        ):
            panel.set_xlabel("γ, tokens drafted")
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].legend(frameon=False)
        return figure

    def tell(self, data: Data) -> Account:
        """Which γ is best, and which is advised."""
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
                f"batch {size}: best γ = {best} ({rows[best]['ratio']:.2f} times the target "
                f"alone), advised from γ = 5: {advised}, which gives {reached:.0%} of that"
            )
            longest = rows[str(_LENGTHS[-1])]
            grows.append(longest["step_ms"] > rows["0"]["step_ms"])
            first = rows["1"]["tokens_per_step"] - 1
            last = (longest["tokens_per_step"] - rows["5"]["tokens_per_step"]) / (_LENGTHS[-1] - 5)
            fades.append(last < 0.5 * first)
            advice.append(reached > 0.95)
            if size == next(iter(data["batches"])):
                said.append(
                    f"independent acceptance as of the first token would give {expected:.2f} "
                    f"tokens per step at γ = {_LENGTHS[-1]}, seen are "
                    f"{longest['tokens_per_step']:.2f}"
                )
        findings = [
            Finding.of(
                "A step takes longer the more is drafted, and the accepted length grows ever less.",
                "; ".join(
                    f"batch {size}: {r[str(_LENGTHS[-1])]['step_ms'] / r['0']['step_ms']:.2f} "
                    f"times the time at γ = {_LENGTHS[-1]}, {r['1']['tokens_per_step']:.2f}, "
                    f"{r['5']['tokens_per_step']:.2f} and "
                    f"{r[str(_LENGTHS[-1])]['tokens_per_step']:.2f} tokens per step at 1, 5 and "
                    f"{_LENGTHS[-1]}"
                    for size, r in data["batches"].items()
                ),
                [*grows, *fades],
            ),
            Finding.of(
                "One token more than is accepted on average is about the best length.",
                "; ".join(said[:1] + said[2:] if len(said) > 2 else said[:1]),
                advice,
            ),
        ]
        text = "; ".join(said)
        return Account(f"{text[0].upper()}{text[1:]}.", findings)


def _acceptance(first: float) -> float:
    return min(max(first, 0.0), 1.0)
