"""Time breakdown of prefill and decoding, with and without overlap and data-parallel drafting.

Recomputes SV's breakdown and its two optimisations (Kim et al. 2025): drafting for one half of the
batch while the other half is verified, and drafting in several processes. The source found that
decoding takes most of the time, and that both optimisations reduce the time of draft and companion.

On a machine where the target alone uses all cores, overlap has little effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.contenders import PolicyContender
from draftwise.benchmark.style import COLOURS, HATCHES, legend_below
from draftwise.core.types import PARTS
from draftwise.llm import LLM
from draftwise.speculation import SpeculationConfig
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.whole_calls import answer_interleaved
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICY = "fixed"
PLAIN, OVERLAP, REPLICAS = "one after the other", "overlap", "two drafting processes"


class Breakdown(Study):
    """Time of prefill and decoding, with and without overlap and data-parallel drafting."""

    name = "breakdown"
    title = "Where the time goes"
    source = SV
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Generate whole answers at the middle batch size."""
        s = bench.settings
        size = sorted(s.batch_sizes)[len(s.batch_sizes) // 2]
        speculation = SpeculationConfig(
            s.draft, policy=_POLICY, num_speculative_tokens=s.num_speculative_tokens
        )
        base = bench.timed_llm
        contenders = [
            PolicyContender(
                "none", base.with_speculation(SpeculationConfig(s.draft, policy="none"))
            )
        ]
        contenders.append(PolicyContender(PLAIN, base.with_speculation(speculation)))
        others: dict[str, dict[str, Any]] = {
            OVERLAP: {"overlap": True},
            REPLICAS: {"draft_replicas": 2},
        }
        if bench.large.target.model.device.type != "cpu":
            others = {}  # both options spread work over CPU cores
        try:
            for name, options in others.items():
                bench.status(f"setting up {name}")
                llm = LLM(
                    s.target,
                    speculation,
                    s.dtype,
                    s.device,
                    max_batch_size=max(size, 2),
                    max_model_len=s.max_model_len,
                    trust_remote_code=s.trust_remote_code,
                    enable_prefix_caching=False,
                    **options,
                )
                contenders.append(PolicyContender(name, llm))
            bench.status("measuring in interleaved turns")
            figures = answer_interleaved(
                "mixed", bench.prompts, contenders, bench.sampling, size, s.rounds
            )
        finally:
            for each in contenders:
                each.close()
        return {"batch_size": size, "max_tokens": s.max_tokens, "ways": figures}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw the time by part of a step, and the speed."""
        modes = data["ways"]
        figure, (parts, speed) = panels(2, width=4.8, height=2.9)
        names = list(modes)
        left = np.zeros(len(names))
        base = modes["none"]["seconds"]
        for number, part in enumerate(PARTS):
            values = np.array(
                [own["share_of_time"][part] * own["seconds"] / base for own in modes.values()]
            )
            parts.barh(
                names,
                values,
                left=left,
                color=COLOURS[number],
                hatch=HATCHES[number],
                edgecolor="white",
                label=part,
            )
            left += values
        parts.invert_yaxis()
        parts.set_xlabel("time for the same answers, × target only")
        parts.grid(axis="y", visible=False)
        middle = [own["ratio"]["median"] for own in modes.values()]
        errors = (
            [own["ratio"]["median"] - own["ratio"]["low"] for own in modes.values()],
            [own["ratio"]["high"] - own["ratio"]["median"] for own in modes.values()],
        )
        at = range(len(names))
        speed.errorbar(middle, at, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
        speed.set_yticks(at, [f"{n} ({modes[n]['prefill_share']:.0%} prefill)" for n in names])
        speed.invert_yaxis()
        speed.set_xlabel("tokens per second, × target only (quartiles)")
        legend_below(figure, parts)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the effect of each option."""
        modes = data["ways"]
        plain = modes[PLAIN]
        said = ", ".join(
            f"{name} {own['ratio']['median']:.2f}" for name, own in modes.items() if name != "none"
        )
        text = (
            f"At batch {data['batch_size']} with {data['max_tokens']} tokens per answer, steps "
            f"with prefill take {modes['none']['prefill_share']:.0%} of the time without "
            f"speculation and {plain['prefill_share']:.0%} with drafts of a fixed length. Speed "
            f"relative to target-only decoding, prefill included: {said}. With sequential drafts, "
            f"drafting takes {plain['share_of_time']['draft']:.0%} of the time and verification "
            f"{plain['share_of_time']['verify']:.0%}."
        )
        findings = [
            Finding.of(
                "Decoding takes most of the time, and prefill takes little.",
                f"prefill takes {modes['none']['prefill_share']:.0%} without and "
                f"{plain['prefill_share']:.0%} with drafts",
                [modes["none"]["prefill_share"] < 0.5, plain["prefill_share"] < 0.5],
            )
        ]
        for name, claim in (
            (OVERLAP, "Overlapping drafting with verification makes decoding faster."),
            (REPLICAS, "Data-parallel drafting makes decoding faster."),
        ):
            if name in modes:
                gain = modes[name]["ratio"]["median"] / plain["ratio"]["median"]
                findings.append(
                    Finding.of(claim, f"{gain:.2f} times the sequential speed", gain > 1.0)
                )
        return Description(text, findings)
