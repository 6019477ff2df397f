"""Whether the companion agrees with the draft where the target does.

Recomputes SV's premise (Kim et al. 2025): S(draft, companion) correlates with S(draft, target) over
drafted positions. The source found them strongly correlated, which is why a small companion can
stand for the target.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS
from draftwise.estimators.information import pearson
from draftwise.estimators.records import Records
from draftwise.studies.drawing import bars, panels, styled
from draftwise.studies.information_gain import short_name
from draftwise.studies.study import SV, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench, same_distribution

_NUM_POINTS = 400
_NUM_BINS = 10
# Bins with fewer tokens say nothing.
_FEWEST = 8


def figures_of(judged: Records, told: Records, seed: int = 0) -> dict[str, Any]:
    """Correlation, and the mean of one overlap over the other."""
    shown = np.random.default_rng(seed).permutation(len(judged))[:_NUM_POINTS]
    bins = np.minimum((judged.overlap * _NUM_BINS).astype(int), _NUM_BINS - 1)
    means = [
        float(told.overlap[bins == b].mean()) if (bins == b).sum() >= _FEWEST else None
        for b in range(_NUM_BINS)
    ]
    return {
        "num_tokens": len(judged),
        "pearson": pearson(judged.overlap, told.overlap),
        "mean_companion": float(judged.overlap.mean()),
        "mean_target": float(told.overlap.mean()),
        "by_companion": means,
        "points": {
            "companion": judged.overlap[shown].tolist(),
            "target": told.overlap[shown].tolist(),
        },
    }


class Correlation(Study):
    """S of draft and companion against S of draft and target."""

    name = "correlation"
    title = "Does the companion agree where the target does?"
    source = SV
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """The draft with every other model for its companion."""
        s = bench.settings
        target = same_distribution(s.target)
        told = bench.collection(s.draft, target, target).records
        assert s.companion is not None
        companions = dict.fromkeys([s.companion, *s.models])
        return {
            "draft": s.draft,
            "companions": {
                name: figures_of(bench.collection(s.draft, name, target).records, told, s.seed)
                for name in companions
                if name not in (s.draft, target)
            },
        }

    @styled
    def draw(self, data: Data) -> Figure:
        """Drafted positions with the main companion; all companions."""
        figure, (cloud, every) = panels(2, width=4.0)
        name, main = next(iter(data["companions"].items()))
        points = main["points"]
        cloud.scatter(
            points["companion"], points["target"], s=6, color="#888888", alpha=0.5, linewidths=0
        )
        middle = (np.arange(_NUM_BINS) + 0.5) / _NUM_BINS
        means = [np.nan if m is None else m for m in main["by_companion"]]
        cloud.plot(middle, means, "o-", color=COLOURS[0], label="mean")
        cloud.plot([0, 1], [0, 1], ":", color="black", linewidth=1)
        cloud.set_xlabel(f"S({short_name(data['draft'])}, {short_name(name)})")
        cloud.set_ylabel(f"S({short_name(data['draft'])}, target)")
        cloud.legend(frameon=False, loc="upper left")
        values = {short_name(n): own["pearson"] for n, own in data["companions"].items()}
        bars(every, list(values), list(values.values()))
        every.set_xlabel("Pearson's correlation of the two overlaps")
        return figure

    def tell(self, data: Data) -> Account:
        """How strong it is, and on what it depends."""
        values = {n: own["pearson"] for n, own in data["companions"].items()}
        said = ", ".join(f"{short_name(n)} {value:.2f}" for n, value in values.items())
        main = next(iter(values.values()))
        text = (
            f"Over drafted positions of {data['draft']} the correlation of S with the companion "
            f"and S with the target is, by companion: {said}."
        )
        return Account(
            text,
            [
                Finding.of(
                    "Draft and companion agree where draft and target do.",
                    f"Pearson's correlation {main:.2f} with the companion",
                    main > 0.5,
                ),
                Finding.of(
                    "It is so for any companion of similar size.",
                    f"from {min(values.values()):.2f} to {max(values.values()):.2f}",
                    [value > 0.5 for value in values.values()],
                ),
            ],
        )
