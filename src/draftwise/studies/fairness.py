"""Fairness of batch-wide selection between requests.

Recomputes SV's analysis of fairness (Kim et al. 2025): the number of verified tokens per request in
a large batch. The source found that no request starves, although the tokens most likely to be
accepted are preferred across the batch. Every request gains at least one token per step, whether or
not any of its drafted tokens is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import look
from draftwise.outputs import SpeculationStats
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICIES = ("fixed:5", "tetris:5", "sv-published:5", "sv:5")
_REQUESTS_PER_ROW = 4


def figures_of(stats: Sequence[SpeculationStats]) -> dict[str, Any]:
    """Distribution of verified and gained tokens per step over the requests."""
    served = [each for each in stats if each.num_steps]
    verified = np.sort([each.num_verified / each.num_steps for each in served])
    total = verified.sum()
    shares = np.arange(1, len(verified) + 1) / len(verified)
    return {
        "num_prompts": len(stats),
        "mean": float(verified.mean()),
        "median": float(np.median(verified)),
        "lowest": verified[:5].tolist(),
        "highest": verified[-5:].tolist(),
        "deciles": np.quantile(verified, np.linspace(0, 1, 11)).tolist(),
        # Gini coefficient: 0 if all values are equal, near 1 if one request has everything.
        "gini": float((2 * shares - 1 / len(verified) - 1) @ verified / total) if total else 0.0,
        "fewest_tokens_per_step": min(each.num_tokens / each.num_steps for each in served),
        "mean_tokens_per_step": float(np.mean([each.mean_accepted_length for each in served])),
    }


class Fairness(Study):
    """Verified tokens per step of each request."""

    name = "fairness"
    title = "Fairness between requests"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Serve many requests at the largest batch size."""
        s = bench.settings
        count = _REQUESTS_PER_ROW * max(s.batch_sizes)
        prompts = [bench.prompts[i % len(bench.prompts)] for i in range(count)]
        base = replace(bench.sampling, ignore_eos=True, max_tokens=min(s.max_tokens, 48))
        params = [replace(base, seed=s.seed + i) for i in range(count)]
        figures = {}
        for each in bench.contenders(_POLICIES):
            bench.status(each.name)
            outputs = each.llm.generate(prompts, params)
            figures[each.name] = figures_of([output.speculation for output in outputs])
        return {"batch_size": max(s.batch_sizes), "policies": figures}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw the quantiles of verified tokens per step over the requests."""
        figure, (axes,) = panels(1, width=5.0)
        at = np.linspace(0, 100, 11)
        for number, (name, own) in enumerate(data["policies"].items()):
            axes.plot(at, own["deciles"], label=name, **look(number))
        axes.set_xlabel("percentile of requests")
        axes.set_ylabel("tokens verified per step")
        axes.set_ylim(bottom=0)
        axes.set_title(f"batch {data['batch_size']}")
        axes.legend(frameon=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the inequality between requests."""
        own = data["policies"]
        said = "; ".join(
            f"{name} {p['lowest'][0]:.2f} to {p['highest'][-1]:.2f}, Gini {p['gini']:.2f}"
            for name, p in own.items()
        )
        text = (
            f"Minimum and maximum of the tokens verified per step over "
            f"{own['sv:5']['num_prompts']} requests at batch {data['batch_size']}: {said}. With "
            "any of these policies, a request gains at least "
            f"{min(p['fewest_tokens_per_step'] for p in own.values()):.2f} tokens per step."
        )
        published, ours = own["sv-published:5"], own["sv:5"]
        return Description(
            text,
            [
                Finding.of(
                    "No request starves: every request gains at least one token per step.",
                    f"at least {published['fewest_tokens_per_step']:.2f} (as published), "
                    f"{ours['fewest_tokens_per_step']:.2f} (lossless)",
                    min(published["fewest_tokens_per_step"], ours["fewest_tokens_per_step"]) >= 1.0,
                ),
                Finding.of(
                    "No request is left without verification.",
                    f"minimum tokens verified per step: {published['lowest'][0]:.2f}, with a mean "
                    f"of {published['mean']:.2f} (as published), and {ours['lowest'][0]:.2f}, with "
                    f"a mean of {ours['mean']:.2f} (lossless)",
                    [
                        p["lowest"][0] > 0.25 * p["mean"] and p["mean"] > 0
                        for p in (published, ours)
                    ],
                ),
            ],
        )
