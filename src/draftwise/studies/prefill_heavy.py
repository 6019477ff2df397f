"""Long prompts and short answers, against short prompts and long answers.

Recomputes SV's prefill-heavy workload (Kim et al. 2025). The source found that where reading the
prompt takes most of the time, speculation of any kind gains less, as it speeds up decoding alone,
and that SV does not lose there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.contenders import PolicyContender
from draftwise.benchmark.style import COLOURS, HATCHES
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Account, Data, Finding, Study
from draftwise.studies.whole_calls import answer_in_turns
from draftwise.studies.workbench import Workbench

_POLICIES = ("fixed:5", "adaptive", "sv")
_LONG_PROMPT, _SHORT_ANSWER = 768, 16
_SHORT_PROMPT = 64


class PrefillHeavy(Study):
    """Whole answers to long and to short prompts."""

    name = "prefill-heavy"
    title = "Long prompts, short answers"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Both workloads at the middle batch size."""
        s = bench.settings
        size = sorted(s.batch_sizes)[len(s.batch_sizes) // 2]
        limit = bench.large.target.max_model_len - s.max_tokens - s.num_speculative_tokens
        shapes = {
            "long prompts, short answers": (min(_LONG_PROMPT, limit), _SHORT_ANSWER),
            "short prompts, long answers": (min(_SHORT_PROMPT, limit), s.max_tokens),
        }
        everybody = [
            PolicyContender(each.name, each.llm) for each in bench.contenders(["none", *_POLICIES])
        ]
        figures = {}
        for name, (prompt, answer) in shapes.items():
            bench.status(name)
            prompts = bench.prompts_of_length(prompt, size)
            params = replace(bench.sampling, max_tokens=answer)
            own = answer_in_turns(name, prompts, everybody, params, size, s.rounds)
            figures[name] = {"prompt": prompt, "answer": answer, "ways": own}
        return {"batch_size": size, "shapes": figures}

    @styled
    def draw(self, data: Data) -> Figure:
        """Speed of each policy on both."""
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
        axes.set_ylabel("speed of whole answers, × target alone")
        axes.legend(frameon=False, loc="lower right", framealpha=1)
        return figure

    def tell(self, data: Data) -> Account:
        """How much is left where prompts take the time."""
        shapes = list(data["shapes"].values())
        long, short = shapes[0]["ways"], shapes[1]["ways"]
        said = "; ".join(
            f"{name} {long[name]['ratio']['median']:.2f} against "
            f"{short[name]['ratio']['median']:.2f}"
            for name in _POLICIES
        )
        text = (
            f"With prompts of {shapes[0]['prompt']} tokens and answers of {shapes[0]['answer']} at "
            f"batch {data['batch_size']}, steps that read prompts take "
            f"{long['none']['prefill_share']:.0%} of the target's time; with prompts of "
            f"{shapes[1]['prompt']} and answers of {shapes[1]['answer']}, "
            f"{short['none']['prefill_share']:.0%}. Speed of whole answers against the target "
            f"alone: {said}."
        )
        return Account(
            text,
            [
                Finding.of(
                    "Where prompts are long and answers short, speculation gains less.",
                    said,
                    [
                        long[name]["ratio"]["median"] < short[name]["ratio"]["median"]
                        for name in _POLICIES
                    ],
                ),
                Finding.of(
                    "SV does not lose there.",
                    f"{long['sv']['ratio']['median']:.2f} times the target alone, "
                    f"{long['sv']['ratio']['median'] / long['fixed:5']['ratio']['median']:.2f} "
                    "times fixed 5",
                    [
                        long["sv"]["ratio"]["median"] >= 0.98,
                        long["sv"]["ratio"]["median"] >= 0.98 * long["fixed:5"]["ratio"]["median"],
                    ],
                ),
            ],
        )
