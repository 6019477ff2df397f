"""Every policy against the oracle.

Beyond the sources. The oracle prices as the others do and knows the target's acceptance of each
token as soon as it is drafted; its knowledge costs no time. The regret of a policy is the share of
the oracle's goodput that it does not reach: 0 for the oracle, negative for what is faster than it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.policies import POLICIES
from draftwise.studies.drawing import heat_map, panels, styled
from draftwise.studies.study import OWN, Account, Data, Finding, Study
from draftwise.studies.sustained import begin, best_static, best_static_unbiased, compete, summary
from draftwise.studies.workbench import Workbench

_STATIC = ("fixed:1", "fixed:2", "fixed:3", "fixed:5", "fixed:7")
_LONGEST = 7
_WITHOUT_NUMBER = ("none", "fixed")


def regrets(figures: Mapping[str, Any], oracle: str) -> dict[str, dict[str, float]]:
    """Regret and its standard error by contender.

    Args:
        figures: of :func:`draftwise.studies.sustained.summary`.
        oracle: name of the oracle's.
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
    """Share of the oracle's goodput that each policy misses."""

    name = "regret"
    title = "Every policy against the oracle"
    source = OWN
    timed = True
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """All policies in turns, at every batch size."""
        s = bench.settings
        others = [f"{name}:{_LONGEST}" for name in POLICIES if name not in _WITHOUT_NUMBER]
        everybody = bench.contenders(["none", *_STATIC, *others])
        oracle = f"oracle:{_LONGEST}"
        batches = {}
        warm_up_steps = s.warm_up_steps
        for size in s.batch_sizes:
            bench.status(f"batch {size}")
            begin(everybody, bench.prompts, bench.sampling, size)
            compete(everybody, max(2, s.rounds // max(1, 3 - size)), s.turn, warm_up_steps, 5)
            # What was learnt of acceptance holds on; only costs are others.
            warm_up_steps = max(1, s.warm_up_steps // 2)
            figures = summary(everybody)
            batches[str(size)] = {
                "policies": regrets(figures, oracle),
                "best_static": best_static(figures),
                "best_static_unbiased": best_static_unbiased(figures),
            }
        return {"oracle": oracle, "batches": batches}

    @styled
    def draw(self, data: Data) -> Figure:
        """Regret by policy and batch size."""
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
            "regret: share of the oracle's goodput missed",
            limits=(-0.1, 0.6),
        )
        return figure

    def tell(self, data: Data) -> Account:
        """How far policies and static lengths are from it."""
        batches, oracle = data["batches"], data["oracle"]
        ours = [f"{name}:{_LONGEST}" for name in ("adaptive", "sv")]
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
            f"{count} contenders in turns. Regret against the oracle: {'; '.join(said)}. The "
            f"standard error of a single one is {error:.2f} on average."
        )
        return Account(
            text,
            [
                Finding.of(
                    "The oracle is ahead of any static length (ours).",
                    "regret of the best static length in hindsight "
                    + ", ".join(f"{r:.2f} at {s}" for r, s in zip(room, batches, strict=True)),
                    [value > 0 for value in room],
                ),
                Finding.of(
                    "A policy that prices comes near the best static length without being told "
                    "(ours).",
                    f"adaptive and sv have {min(static):.2f} to {max(static):.2f} of it",
                    [value > 0.9 for value in static],
                ),
                Finding.of(
                    "The oracle's own regret is 0 (a check).",
                    ", ".join(f"{b['policies'][oracle]['regret']:.2f}" for b in batches.values()),
                    all(b["policies"][oracle]["regret"] == 0 for b in batches.values()),
                ),
            ],
        )
