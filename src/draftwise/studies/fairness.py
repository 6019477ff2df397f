"""Whether a choice over the whole batch leaves some requests behind.

Recomputes SV's look at fairness (Kim et al. 2025): how many tokens are verified for each request of
a large batch. The source found that although likely tokens are preferred wherever they are, no
request goes without for long: a request gains at least one token in every step whatever is
verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.style import look
from draftwise.engine.request import Request
from draftwise.llm import LLM
from draftwise.outputs import SpeculationStats
from draftwise.params import SamplingParams
from draftwise.studies.drawing import panels, styled
from draftwise.studies.study import SV, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench

_POLICIES = ("fixed:5", "tetris:5", "sv-published:5", "sv:5")
_REQUESTS_PER_ROW = 4


def shares_of_requests(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    on_step: Callable[[list[Request]], None] | None = None,
) -> dict[str, Any]:
    """Tokens verified and gained per step, request by request.

    Args:
        llm: with a policy.
        prompts: served at the engine's batch size.
        params: one for each.
        on_step: called after every step with the requests that gained tokens.
    """
    outputs = llm.generate(list(prompts), list(params), on_step)
    return figures_of([output.speculation for output in outputs])


def figures_of(stats: Sequence[SpeculationStats]) -> dict[str, Any]:
    """All figures of some requests."""
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
        # Gini's coefficient: 0 where all have the same, near 1 where one has everything.
        "gini": float((2 * shares - 1 / len(verified) - 1) @ verified / total) if total else 0.0,
        "fewest_tokens_per_step": min(each.num_tokens / each.num_steps for each in served),
        "mean_tokens_per_step": float(np.mean([each.mean_accepted_length for each in served])),
    }


class Fairness(Study):
    """Verified tokens per step, request by request."""

    name = "fairness"
    title = "Does everybody get a share?"
    source = SV
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Many requests at the largest batch size."""
        s = bench.settings
        count = _REQUESTS_PER_ROW * max(s.batch_sizes)
        prompts = [bench.prompts[i % len(bench.prompts)] for i in range(count)]
        base = replace(bench.sampling, ignore_eos=True, max_tokens=min(s.max_tokens, 48))
        params = [replace(base, seed=s.seed + i) for i in range(count)]
        figures = {}
        for each in bench.contenders(_POLICIES):
            bench.status(each.name)
            figures[each.name] = shares_of_requests(each.llm, prompts, params)
        return {"batch_size": max(s.batch_sizes), "policies": figures}

    @styled
    def draw(self, data: Data) -> Figure:
        """Requests in the order of what they get."""
        figure, (axes,) = panels(1, width=5.0)
        at = np.linspace(0, 100, 11)
        for number, (name, own) in enumerate(data["policies"].items()):
            axes.plot(at, own["deciles"], label=name, **look(number))
        axes.set_xlabel("requests from least to most verified, per cent")
        axes.set_ylabel("tokens verified per step")
        axes.set_ylim(bottom=0)
        axes.set_title(f"batch {data['batch_size']}")
        axes.legend(frameon=False)
        return figure

    def tell(self, data: Data) -> Account:
        """How uneven it is."""
        own = data["policies"]
        said = "; ".join(
            f"{name} {p['lowest'][0]:.2f} to {p['highest'][-1]:.2f}, Gini {p['gini']:.2f}"
            for name, p in own.items()
        )
        text = (
            f"Tokens verified per step, from the request that gets least to the one that gets most "
            f"of {own['sv:5']['num_prompts']} at batch {data['batch_size']}: {said}. A request "
            f"gains at least {min(p['fewest_tokens_per_step'] for p in own.values()):.2f} tokens "
            "per step whoever decides."
        )
        published, ours = own["sv-published:5"], own["sv:5"]
        return Account(
            text,
            [
                Finding.of(
                    "A batch-wide choice starves nobody: everybody gains a token per step or more.",
                    f"at least {published['fewest_tokens_per_step']:.2f} (as published), "
                    f"{ours['fewest_tokens_per_step']:.2f} (lossless)",
                    min(published["fewest_tokens_per_step"], ours["fewest_tokens_per_step"]) >= 1.0,
                ),
                Finding.of(
                    "Nor is anybody left without verification.",
                    f"least per step: {published['lowest'][0]:.2f} of {published['mean']:.2f} on "
                    f"average (as published), {ours['lowest'][0]:.2f} of {ours['mean']:.2f}",
                    [
                        p["lowest"][0] > 0.25 * p["mean"] and p["mean"] > 0
                        for p in (published, ours)
                    ],
                ),
            ],
        )
