"""Where the time goes: prompts and decoding, with overlap and data-parallel drafting on and off.

Recomputes SV's breakdown and its two optimisations (Kim et al. 2025): drafting for one half of the
batch while the other is verified, and drafting in several processes. The source found that decoding
takes most of the time, and that both optimisations make draft and companion cheaper in it.

On a machine whose cores the target keeps busy by itself there is little to overlap with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.contenders import PolicyContender
from draftwise.benchmark.style import COLOURS, HATCHES, legend_below
from draftwise.core.types import PARTS
from draftwise.llm import LLM
from draftwise.params import SpeculationConfig
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Account, Data, Finding, Study
from draftwise.studies.whole_calls import answer_in_turns
from draftwise.studies.workbench import Workbench

_POLICY = "fixed"
PLAIN, OVERLAP, REPLICAS = "one after the other", "overlap", "two drafting processes"


class Breakdown(Study):
    """Prefill against decode; overlap and data-parallel drafting on and off."""

    name = "breakdown"
    title = "Where the time goes"
    source = SV
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Whole answers at the middle batch size."""
        s = bench.settings
        size = sorted(s.batch_sizes)[len(s.batch_sizes) // 2]
        speculation = SpeculationConfig(
            s.draft, policy=_POLICY, num_speculative_tokens=s.num_speculative_tokens
        )
        base = bench.timed_llm
        everybody = [
            PolicyContender(
                "none", base.with_speculation(SpeculationConfig(s.draft, policy="none"))
            )
        ]
        everybody.append(PolicyContender(PLAIN, base.with_speculation(speculation)))
        others: dict[str, dict[str, Any]] = {
            OVERLAP: {"overlap": True},
            REPLICAS: {"draft_replicas": 2},
        }
        if bench.large.target.model.device.type != "cpu":
            others = {}  # one device has nothing to spread over
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
                    **options,
                )
                everybody.append(PolicyContender(name, llm))
            bench.status("taking turns")
            figures = answer_in_turns(
                "mixed", bench.prompts, everybody, bench.sampling, size, s.rounds
            )
        finally:
            for each in everybody:
                each.close()
        return {"batch_size": size, "max_tokens": s.max_tokens, "ways": figures}

    @styled
    def draw(self, data: Data) -> Figure:
        """Parts of the time; speed."""
        ways = data["ways"]
        figure, (parts, speed) = panels(2, width=4.8, height=2.9)
        names = list(ways)
        left = np.zeros(len(names))
        base = ways["none"]["seconds"]
        for number, part in enumerate(PARTS):
            values = np.array(
                [own["share_of_time"][part] * own["seconds"] / base for own in ways.values()]
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
        parts.set_xlabel("time for the same answers, × target alone")
        parts.grid(axis="y", visible=False)
        middle = [own["ratio"]["median"] for own in ways.values()]
        errors = (
            [own["ratio"]["median"] - own["ratio"]["low"] for own in ways.values()],
            [own["ratio"]["high"] - own["ratio"]["median"] for own in ways.values()],
        )
        at = range(len(names))
        speed.errorbar(middle, at, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
        speed.set_yticks(at, [f"{n} ({ways[n]['prefill_share']:.0%} prompts)" for n in names])
        speed.invert_yaxis()
        speed.set_xlabel("tokens per second, × target alone (quartiles)")
        legend_below(figure, parts)
        return figure

    def tell(self, data: Data) -> Account:
        """What each way changes."""
        ways = data["ways"]
        plain = ways[PLAIN]
        said = ", ".join(
            f"{name} {own['ratio']['median']:.2f}" for name, own in ways.items() if name != "none"
        )
        text = (
            f"At batch {data['batch_size']} with {data['max_tokens']} tokens per answer, steps "
            f"that read prompts take {ways['none']['prefill_share']:.0%} of the time of the target "
            f"alone and {plain['prefill_share']:.0%} with drafts of a fixed length. Speed against "
            f"the target alone, prompts included: {said}. With drafts, drafting takes "
            f"{plain['share_of_time']['draft']:.0%} of the time and verifying "
            f"{plain['share_of_time']['verify']:.0%}."
        )
        findings = [
            Finding.of(
                "Decoding takes most of the time, reading prompts little.",
                f"prompts {ways['none']['prefill_share']:.0%} without and "
                f"{plain['prefill_share']:.0%} with drafts",
                [ways["none"]["prefill_share"] < 0.5, plain["prefill_share"] < 0.5],
            )
        ]
        for name, claim in (
            (OVERLAP, "Overlapping drafting with verification makes decoding faster."),
            (REPLICAS, "Drafting data-parallel makes decoding faster."),
        ):
            if name in ways:
                gain = ways[name]["ratio"]["median"] / plain["ratio"]["median"]
                findings.append(
                    Finding.of(claim, f"{gain:.2f} times the speed without", gain > 1.0)
                )
        return Account(text, findings)
