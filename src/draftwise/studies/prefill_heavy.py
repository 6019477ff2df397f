"""A prefill-heavy workload (long prompts, short answers) against a decode-heavy one.

Recomputes SV's prefill-heavy workload (Kim et al. 2025). The source found that speculation has a
smaller speed-up where prefill takes most of the time, as it accelerates decoding only, and that SV
is not slower than the baselines there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.contenders import PolicyContender
from draftwise.benchmark.style import COLOURS, HATCHES
from draftwise.studies.contexts import longest_prompt
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.whole_calls import answer_interleaved
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICIES = ("fixed:5", "adaptive", "sv")
_LONG_PROMPT, _SHORT_ANSWER = 768, 16
_SHORT_PROMPT = 64


class PrefillHeavy(Study):
    """Speed of whole answers to long and to short prompts."""

    name = "prefill-heavy"
    title = "Long prompts, short answers"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure both workloads at the middle batch size."""
        s = bench.settings
        size = sorted(s.batch_sizes)[len(s.batch_sizes) // 2]
        room = s.max_tokens + s.num_speculative_tokens
        longest = longest_prompt(bench.large.target.max_model_len, room)
        shapes = {
            "long prompts, short answers": (min(_LONG_PROMPT, longest), _SHORT_ANSWER),
            "short prompts, long answers": (min(_SHORT_PROMPT, longest), s.max_tokens),
        }
        contenders = [
            PolicyContender(each.name, each.llm) for each in bench.contenders(["none", *_POLICIES])
        ]
        figures = {}
        for name, (prompt, answer) in shapes.items():
            bench.status(name)
            prompts = bench.prompts_of_length(prompt, size)
            params = replace(bench.sampling, max_tokens=answer)
            own = answer_interleaved(name, prompts, contenders, params, size, s.rounds)
            figures[name] = {"prompt": prompt, "answer": answer, "ways": own}
        return {"batch_size": size, "shapes": figures}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw the speed of each policy on both workloads."""
        figure, (axes,) = panels(1, width=5.4)
        at = np.arange(len(_POLICIES))
        for number, (name, own) in enumerate(data["shapes"].items()):
            ratio = [own["ways"][policy]["ratio"] for policy in _POLICIES]
            axes.bar(
                at + (number - 0.5) * 0.4,
                [each["median"] for each in ratio],
                0.38,
                yerr=(
                    [each["median"] - each["low"] for each in ratio],
                    [each["high"] - each["median"] for each in ratio],
                ),
                color=COLOURS[number],
                hatch=HATCHES[number],
                edgecolor="white",
                capsize=2,
                label=f"{name} ({own['prompt']} and {own['answer']} tokens)",
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(at, _POLICIES)
        axes.set_ylabel("speed of whole answers, × target only")
        axes.legend(frameon=False, loc="lower right", framealpha=1)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the speed-up with and without much prefill."""
        shapes = list(data["shapes"].values())
        long, short = shapes[0]["ways"], shapes[1]["ways"]
        said = "; ".join(
            f"{name} {long[name]['ratio']['median']:.2f} against "
            f"{short[name]['ratio']['median']:.2f}"
            for name in _POLICIES
        )
        text = (
            f"With prompts of {shapes[0]['prompt']} tokens and answers of {shapes[0]['answer']} at "
            f"batch {data['batch_size']}, steps with prefill take "
            f"{long['none']['prefill_share']:.0%} of the time of target-only decoding. With "
            f"prompts of {shapes[1]['prompt']} and answers of {shapes[1]['answer']} they take "
            f"{short['none']['prefill_share']:.0%}. Speed of whole answers relative to target-only "
            f"decoding, on the first and on the second workload: {said}."
        )
        return Description(
            text,
            [
                Finding.of(
                    "With long prompts and short answers, speculation has a smaller speed-up.",
                    said,
                    [
                        long[name]["ratio"]["median"] < short[name]["ratio"]["median"]
                        for name in _POLICIES
                    ],
                ),
                Finding.of(
                    "SV is not slower than the baselines there.",
                    f"{long['sv']['ratio']['median']:.2f} times target-only decoding, "
                    f"{long['sv']['ratio']['median'] / long['fixed:5']['ratio']['median']:.2f} "
                    "times fixed 5",
                    [
                        long["sv"]["ratio"]["median"] >= 0.98,
                        long["sv"]["ratio"]["median"] >= 0.98 * long["fixed:5"]["ratio"]["median"],
                    ],
                ),
            ],
        )
