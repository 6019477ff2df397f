"""Which companion: the draft quantised, the draft fine-tuned, another model.

Recomputes SV's comparison of companions (Kim et al. 2025). The source found that a quantised or a
fine-tuned draft serves as a companion, that another small model of the family tells more, and that
the choice changes the gain less than having a companion at all.

Companions are ``draft:int8`` and all models of ``--models``; a folder with a fine-tuned draft can
be among them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS
from draftwise.estimators.information import information_gains, pearson
from draftwise.estimators.records import Records
from draftwise.studies.drawing import panels, styled
from draftwise.studies.information_gain import short_name
from draftwise.studies.study import SV, Account, Data, Finding, Study
from draftwise.studies.sustained import begin, compete, summary
from draftwise.studies.workbench import Workbench, same_distribution

QUANTISED = "draft:int8"


def knowledge(records: Records, told: Records) -> dict[str, Any]:
    """What a companion knows: its records against those that the target judged."""
    gains = information_gains(records)
    return {
        "overlap": float(records.overlap.mean()),
        "pearson": pearson(records.overlap, told.overlap),
        "gain": gains["S,A adaptive"].corrected,
        "entropy": gains["H"].entropy,
        "free_gain": gains["q(x)"].corrected,
    }


class CompanionChoice(Study):
    """What each companion knows, costs and gains."""

    name = "companion-choice"
    title = "Which companion"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """At the middle batch size."""
        s = bench.settings
        size = sorted(s.batch_sizes)[len(s.batch_sizes) // 2]
        target = same_distribution(s.target)
        others = [s.companion, *s.models]
        companions = dict.fromkeys(
            [QUANTISED, *(name for name in others if name and name not in (target, s.draft))]
        )
        told = bench.collection(s.draft, target, target).records
        rows = {
            name: knowledge(bench.collection(companion=name).records, told) for name in companions
        }
        everybody = bench.contenders(["none", "fixed:5"])
        for name in companions:
            for policy in ("sv-published", "sv"):
                (each,) = bench.contenders([policy], companion=name)
                everybody.append(replace(each, name=f"{policy} {name}"))
        begin(everybody, bench.prompts, bench.sampling, size)
        bench.status("taking turns")
        compete(everybody, s.rounds, s.turn, s.warm_up_steps, 5)
        timed = summary(everybody)
        gamma = s.num_speculative_tokens
        for name, own in rows.items():
            latency = next(e for e in everybody if e.name == f"sv {name}").llm.engine.latency
            assert latency is not None
            drafting = gamma * latency.draft_seconds(size)
            own["cost"] = latency.companion_seconds(gamma * size) / drafting
            for policy in ("sv-published", "sv"):
                figures = timed[f"{policy} {name}"]
                own[policy] = {
                    key: figures[key]
                    for key in ("ratio", "standard_error", "judged_per_request_step")
                }
        return {"batch_size": size, "fixed": timed["fixed:5"]["ratio"], "companions": rows}

    @styled
    def draw(self, data: Data) -> Figure:
        """Knowledge, cost and speed."""
        rows = data["companions"]
        figure, axes = panels(3, width=3.7, height=2.8, sharey=True)
        at = range(len(rows))
        knows, costs, speed = axes
        knows.barh(at, [r["gain"] for r in rows.values()], color=COLOURS[0], height=0.6)
        free = next(iter(rows.values()))["free_gain"]
        knows.axvline(free, color="black", linestyle=":", linewidth=1)
        knows.set_xlabel("information gain of S and A, bits\n(dotted: of q(x) alone)")
        costs.barh(at, [r["cost"] for r in rows.values()], color=COLOURS[1], height=0.6)
        costs.set_xlabel("time of its pass, × the draft's passes")
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
        speed.set_xlabel("tokens per second, × target alone\n(dotted: fixed 5)")
        speed.legend(frameon=False, fontsize=7)
        knows.set_yticks(at, [short_name(name) for name in rows])
        knows.invert_yaxis()
        for panel in axes:
            panel.grid(axis="y", visible=False)
        return figure

    def tell(self, data: Data) -> Account:
        """Which tells most, and which is worth it."""
        rows = data["companions"]
        said = "; ".join(
            f"{short_name(name)} {r['gain']:.3f} bits at {r['cost']:.2f} of the draft's time, "
            f"{r['sv-published']['ratio']:.2f} (published) and {r['sv']['ratio']:.2f} (ours) times "
            "the target alone"
            for name, r in rows.items()
        )
        text = (
            f"At batch {data['batch_size']}, where a fixed length of 5 has {data['fixed']:.2f}: "
            f"{said}."
        )
        quantised = rows[QUANTISED]
        others = {name: r for name, r in rows.items() if name != QUANTISED}
        best = max(others, key=lambda name: others[name]["gain"], default=None)
        published = [r["sv-published"]["ratio"] for r in rows.values()]
        another = []
        if best is not None:  # the quantised draft may be the only companion
            another = [
                Finding.of(
                    "Another small model tells more.",
                    f"{short_name(best)} {others[best]['gain']:.3f} bits",
                    others[best]["gain"] > quantised["gain"],
                )
            ]
        return Account(
            text,
            [
                Finding.of(
                    "The quantised draft serves as a companion.",
                    f"{quantised['gain']:.3f} bits, where q(x) alone, which is free, tells "
                    f"{quantised['free_gain']:.3f}",
                    quantised["gain"] > quantised["free_gain"],
                ),
                *another,
                Finding.of(
                    "The choice matters less than having one.",
                    f"published SV from {min(published):.2f} to {max(published):.2f} by "
                    f"companion, fixed 5 {data['fixed']:.2f}",
                    max(published) - min(published) < abs(max(published) - data["fixed"]),
                ),
            ],
        )
