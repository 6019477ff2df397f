"""Drafted and accepted tokens of each policy in every step of one generation.

Recomputes SVIP's figure of draft lengths in one generation (Zhang et al. 2024): the draft length of
each step with a fixed length, the heuristic and SVIP. The source found that SVIP's draft lengths
follow the accepted lengths, while those of the heuristic lag behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import COLOURS
from draftwise.engine.request import Request
from draftwise.studies.drawing import count_on, panels, styled
from draftwise.studies.study import SVIP, Data, Description, Finding, Study
from draftwise.studies.sustained import Contender
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_LENGTH = 10
_POLICIES = (
    "fixed:5",
    f"heuristic:{_MAX_LENGTH}",
    f"svip:{_MAX_LENGTH}",
    f"adaptive:{_MAX_LENGTH}",
)


def trace(contender: Contender, prompt: list[int], seed: int, max_tokens: int) -> dict[str, Any]:
    """Drafted and accepted tokens of every step of one request."""
    drafted: list[int] = []
    accepted: list[int] = []
    before = [0, 0, 0]

    def on_step(requests: list[Request]) -> None:
        for request in requests:
            stats = request.stats
            now = [stats.num_steps, stats.num_drafted, stats.num_accepted]
            if now[0] > before[0]:
                drafted.append(now[1] - before[1])
                accepted.append(now[2] - before[2])
            before[:] = now

    params = replace(contender.params, max_tokens=max_tokens, seed=seed, ignore_eos=True)
    contender.llm.generate([prompt], params, on_step)
    return {"drafted": drafted, "accepted": accepted, "num_tokens": max_tokens}


def figures_of(own: dict[str, Any]) -> dict[str, Any]:
    """Add summary statistics to a trace."""
    drafted, accepted = np.array(own["drafted"]), np.array(own["accepted"])
    own |= {
        "steps": len(drafted),
        "drafted_per_step": float(drafted.mean()),
        "accepted_per_step": float(accepted.mean()),
        "wasted": float((drafted - accepted).sum() / max(drafted.sum(), 1)),
        "fully_accepted": float(((drafted == accepted) & (drafted > 0)).mean()),
    }
    varies = np.ptp(drafted) > 0 and np.ptp(accepted) > 0
    own["correlation"] = float(np.corrcoef(drafted, accepted)[0, 1]) if varies else None
    return own


class DraftLengthTrace(Study):
    """Draft length by step and policy in one generation."""

    name = "draft-length-trace"
    title = "Draft lengths in one generation"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Run each policy on one prompt at temperature 0, so all generate the same text."""
        prompt, length = bench.prompts[0], bench.settings.long_text
        return {
            "longest": _MAX_LENGTH,
            "policies": {
                each.name: figures_of(trace(_greedy(each, bench), prompt, 0, length))
                for each in bench.contenders(_POLICIES)
            },
        }

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw one panel per policy."""
        policies = data["policies"]
        figure, axes = panels(1, len(policies), width=7.2, height=1.5, sharex=True, sharey=True)
        for panel, (name, own) in zip(axes, policies.items(), strict=True):
            edges = np.arange(own["steps"] + 1) - 0.5
            panel.stairs(own["drafted"], edges, fill=True, color="#cccccc", label="drafted")
            panel.stairs(own["accepted"], edges, fill=True, color=COLOURS[0], label="accepted")
            panel.set_title(
                f"{name}: {own['steps']} steps, {own['accepted_per_step']:.1f} of "
                f"{own['drafted_per_step']:.1f} tokens accepted per step",
                loc="left",
            )
            count_on(panel.yaxis)
            panel.set_ylabel("tokens")
        axes[0].legend(frameon=False, loc="upper right", ncols=2)
        axes[-1].set_xlabel("step")
        return figure

    def describe(self, data: Data) -> Description:
        """Describe how closely draft lengths follow accepted lengths."""
        own = data["policies"]
        said = "; ".join(
            f"{name} drafts {o['drafted_per_step']:.1f} tokens per step, of which "
            f"{o['accepted_per_step']:.1f} are accepted, in {o['steps']} steps"
            for name, o in own.items()
        )
        text = (
            f"All policies generate the same greedy text of {own['fixed:5']['num_tokens']} tokens: "
            f"{said}."
        )
        svip, rule = own[f"svip:{_MAX_LENGTH}"], own[f"heuristic:{_MAX_LENGTH}"]
        pair = svip["correlation"] or 0.0, rule["correlation"] or 0.0
        return Description(
            text,
            [
                Finding.of(
                    "SVIP's draft lengths follow the accepted lengths; the heuristic's lag behind.",
                    f"correlation of drafted and accepted tokens {pair[0]:.2f} against "
                    f"{pair[1]:.2f}",
                    pair[0] > pair[1],
                ),
                Finding.of(
                    "SVIP wastes fewer drafted tokens.",
                    f"{svip['wasted']:.0%} of its drafted tokens are not accepted, against "
                    f"{rule['wasted']:.0%} of the heuristic's",
                    svip["wasted"] < rule["wasted"],
                ),
            ],
        )


def _greedy(contender: Contender, bench: Workbench) -> Contender:
    contender.params = replace(bench.sampling, temperature=0.0, top_p=1.0)
    return contender
