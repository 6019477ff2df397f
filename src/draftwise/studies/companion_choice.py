"""Comparison of companions: the quantised draft, a fine-tuned draft, or another model.

Recomputes SV's comparison of companions (Kim et al. 2025). The source found that a quantised or
fine-tuned draft can serve as a companion, that another small model of the family is more
informative, and that the choice of companion matters less than having one.

The companions are ``draft:int8`` and all models of ``--models``, which may include a folder with a
fine-tuned draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftwise.benchmark.style import COLOURS
from draftwise.benchmark.sustained import begin, compete, summary
from draftwise.estimators.information import information_gains, pearson
from draftwise.estimators.records import Records
from draftwise.studies.drawing import panels, styled
from draftwise.studies.information_gain import short_name
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench, same_distribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTISED = "draft:int8"


def companion_information(records: Records, target_records: Records) -> dict[str, Any]:
    """Information of a companion about acceptance.

    Args:
        records: drafted tokens with the companion's S and A.
        target_records: the same tokens with the target in the companion's place.
    """
    gains = information_gains(records)
    return {
        "overlap": float(records.overlap.mean()),
        "pearson": pearson(records.overlap, target_records.overlap),
        "gain": gains["S,A adaptive"].corrected,
        "entropy": gains["H"].entropy,
        "free_gain": gains["q(x)"].corrected,
    }


class CompanionChoice(Study):
    """Information, cost and speed-up of each companion."""

    name = "companion-choice"
    title = "Which companion"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Compare all companions at the middle batch size."""
        s = bench.settings
        size = sorted(s.batch_sizes)[len(s.batch_sizes) // 2]
        target = same_distribution(s.target)
        others = [s.companion, *s.models]
        companions = dict.fromkeys(
            [QUANTISED, *(name for name in others if name and name not in (target, s.draft))]
        )
        target_records = bench.collection(s.draft, target, target).records
        rows = {
            name: companion_information(bench.collection(companion=name).records, target_records)
            for name in companions
        }
        contenders = bench.contenders(["none", "fixed:5"])
        for name in companions:
            for policy in ("sv-published", "sv"):
                (each,) = bench.contenders([policy], companion=name)
                contenders.append(replace(each, name=f"{policy} {name}"))
        begin(contenders, bench.prompts, bench.sampling, size)
        bench.status("measuring in interleaved turns")
        compete(contenders, s.rounds, s.turn, s.warm_up_steps, 5)
        timed = summary(contenders)
        gamma = s.num_speculative_tokens
        for name, own in rows.items():
            latency = next(e for e in contenders if e.name == f"sv {name}").llm.engine.latency
            assert latency is not None
            drafting = latency.drafting_seconds([size] * gamma)
            own["cost"] = latency.companion_seconds(gamma * size) / drafting
            for policy in ("sv-published", "sv"):
                figures = timed[f"{policy} {name}"]
                own[policy] = {
                    key: figures[key]
                    for key in ("ratio", "standard_error", "scored_per_request_step")
                }
        return {"batch_size": size, "fixed": timed["fixed:5"]["ratio"], "companions": rows}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw information gain, cost and speed."""
        rows = data["companions"]
        figure, axes = panels(3, width=3.7, height=2.8, sharey=True)
        at = range(len(rows))
        knows, costs, speed = axes
        knows.barh(at, [r["gain"] for r in rows.values()], color=COLOURS[0], height=0.6)
        free = next(iter(rows.values()))["free_gain"]
        knows.axvline(free, color="black", linestyle=":", linewidth=1)
        knows.set_xlabel("information gain of S and A, bits\n(dotted: of q(x) alone)")
        costs.barh(at, [r["cost"] for r in rows.values()], color=COLOURS[1], height=0.6)
        costs.set_xlabel("time of the companion's pass, × the draft's passes")
        for number, policy in enumerate(("sv-published", "sv")):
            speed.errorbar(
                [r[policy]["ratio"] for r in rows.values()],
                [i + 0.15 * (2 * number - 1) for i in at],
                xerr=[r[policy]["standard_error"] for r in rows.values()],
                fmt="os"[number],
                color=COLOURS[number + 2],
                capsize=2,
                label=policy,
            )
        speed.axvline(data["fixed"], color="black", linestyle=":", linewidth=1)
        speed.set_xlabel("tokens per second, × target only\n(dotted: fixed 5)")
        speed.legend(frameon=False, fontsize=7)
        knows.set_yticks(at, [short_name(name) for name in rows])
        knows.invert_yaxis()
        for panel in axes:
            panel.grid(axis="y", visible=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the information, cost and speed-up of each companion."""
        rows = data["companions"]
        said = "; ".join(
            f"{short_name(name)} has {r['gain']:.3f} bits at {r['cost']:.2f} of the draft's time, "
            f"{r['sv-published']['ratio']:.2f} times (published) and {r['sv']['ratio']:.2f} times "
            "(ours) the speed of target-only decoding"
            for name, r in rows.items()
        )
        text = (
            f"At batch {data['batch_size']}, where a fixed length of 5 has {data['fixed']:.2f} "
            f"times the speed of target-only decoding: {said}."
        )
        quantised = rows[QUANTISED]
        others = {name: r for name, r in rows.items() if name != QUANTISED}
        best = max(others, key=lambda name: others[name]["gain"], default=None)
        published = [r["sv-published"]["ratio"] for r in rows.values()]
        another = []
        if best is not None:  # the quantised draft may be the only companion
            another = [
                Finding.of(
                    "Another small model is more informative.",
                    f"{short_name(best)} {others[best]['gain']:.3f} bits",
                    others[best]["gain"] > quantised["gain"],
                )
            ]
        return Description(
            text,
            [
                Finding.of(
                    "The quantised draft serves as a companion.",
                    f"{quantised['gain']:.3f} bits, against {quantised['free_gain']:.3f} bits of "
                    "q(x) alone, which is free",
                    quantised["gain"] > quantised["free_gain"],
                ),
                *another,
                Finding.of(
                    "The choice of companion matters less than having one.",
                    f"published SV ranges from {min(published):.2f} to {max(published):.2f} over "
                    f"the companions, and fixed 5 has {data['fixed']:.2f}",
                    max(published) - min(published) < max(published) - data["fixed"],
                ),
            ],
        )
