"""Regret of every policy against the oracle.

This study goes beyond the sources. The oracle uses the same cost model as other policies, and knows
the acceptance of each token as soon as it is drafted, at no cost. The regret of a policy is
1 − (its goodput / the oracle's goodput). It is 0 for the oracle, and negative for a policy that is
faster than the oracle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.policies import POLICIES
from draftwise.studies.drawing import heat_map, panels, styled
from draftwise.studies.study import OWN, Data, Description, Finding, Study
from draftwise.studies.sustained import begin, best_static, best_static_unbiased, compete, summary
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STATIC = ("fixed:1", "fixed:2", "fixed:3", "fixed:5", "fixed:7")
_MAX_LENGTH = 7
_WITHOUT_NUMBER = ("none", "fixed")


def regrets(figures: Mapping[str, Any], oracle: str) -> dict[str, dict[str, float]]:
    """Regret and its standard error by contender.

    Args:
        figures: result of :func:`draftwise.studies.sustained.summary`.
        oracle: name of the contender with the oracle policy.
    """
    best, error = figures[oracle]["ratio"], figures[oracle]["standard_error"]
    result = {}
    for name, own in figures.items():
        share = own["ratio"] / best
        relative = np.hypot(own["standard_error"] / max(own["ratio"], 1e-9), error / best)
        result[name] = {
            "ratio": own["ratio"],
            "regret": 1 - share,
            "standard_error": 0.0 if name == oracle else float(share * relative),
        }
    return result


class Regret(Study):
    """Regret of each policy relative to the oracle."""

    name = "regret"
    title = "Every policy against the oracle"
    source = OWN
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Measure all policies in interleaved turns at every batch size."""
        s = bench.settings
        others = [f"{name}:{_MAX_LENGTH}" for name in POLICIES if name not in _WITHOUT_NUMBER]
        contenders = bench.contenders(["none", *_STATIC, *others])
        oracle = f"oracle:{_MAX_LENGTH}"
        batches = {}
        warm_up_steps = s.warm_up_steps
        for size in s.batch_sizes:
            bench.status(f"batch {size}")
            begin(contenders, bench.prompts, bench.sampling, size)
            compete(contenders, max(2, s.rounds // max(1, 3 - size)), s.turn, warm_up_steps, 5)
            # The learnt acceptance remains valid; only the costs change with the batch size.
            warm_up_steps = max(1, s.warm_up_steps // 2)
            figures = summary(contenders)
            batches[str(size)] = {
                "policies": regrets(figures, oracle),
                "best_static": best_static(figures),
                "best_static_unbiased": best_static_unbiased(figures),
            }
        return {"oracle": oracle, "batches": batches}

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw regret by policy and batch size."""
        batches = data["batches"]
        names = list(next(iter(batches.values()))["policies"])
        values = [[b["policies"][name]["regret"] for b in batches.values()] for name in names]
        order = sorted(range(len(names)), key=lambda i: sum(values[i]))
        figure, (axes,) = panels(1, width=1.6 + 0.9 * len(batches), height=0.9 + 0.22 * len(names))
        heat_map(
            axes,
            [values[i] for i in order],
            [f"batch {size}" for size in batches],
            [names[i] for i in order],
            "regret: 1 − goodput / oracle's goodput",
            limits=(-0.1, 0.6),
        )
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the regret of policies and of static lengths."""
        batches, oracle = data["batches"], data["oracle"]
        ours = [f"{name}:{_MAX_LENGTH}" for name in ("adaptive", "sv")]
        said, room, static = [], [], []
        for size, own in batches.items():
            policies = own["policies"]
            best = policies[own["best_static"]]
            own_regrets = ", ".join(f"{n} {policies[n]['regret']:.2f}" for n in ours)
            said.append(
                f"batch {size}: {own_regrets}, the "
                f"best static length ({own['best_static']}) {best['regret']:.2f}"
            )
            room.append(best["regret"])
            static += [policies[n]["ratio"] / best["ratio"] for n in ours]
        error = np.mean(
            [p["standard_error"] for own in batches.values() for p in own["policies"].values()]
        )
        count = len(next(iter(batches.values()))["policies"])
        text = (
            f"{count} contenders in interleaved turns. Regret against the oracle: "
            f"{'; '.join(said)}. The mean standard error of a regret is {error:.2f}."
        )
        return Description(
            text,
            [
                Finding.of(
                    "The oracle is faster than any static length (ours).",
                    "regret of the best static length in hindsight "
                    + ", ".join(f"{r:.2f} at {s}" for r, s in zip(room, batches, strict=True)),
                    [value > 0 for value in room],
                ),
                Finding.of(
                    "Cost-aware policies come close to the best static length (ours).",
                    f"adaptive and sv have {min(static):.2f} to {max(static):.2f} of its goodput",
                    [value > 0.9 for value in static],
                ),
                Finding.of(
                    "The oracle's own regret is 0 (a check).",
                    ", ".join(f"{b['policies'][oracle]['regret']:.2f}" for b in batches.values()),
                    all(b["policies"][oracle]["regret"] == 0 for b in batches.values()),
                ),
            ],
        )
