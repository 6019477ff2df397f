"""Correlation between the overlaps of draft and companion and of draft and target.

Recomputes SV's premise (Kim et al. 2025) that S(draft, companion) is correlated with
S(draft, target) over drafted positions. The source found a strong correlation, which is why a small
companion can approximate the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import COLOURS
from draftwise.estimators.information import pearson
from draftwise.estimators.records import Records
from draftwise.studies.drawing import bars, panels, styled
from draftwise.studies.information_gain import short_name
from draftwise.studies.study import SV, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench, same_distribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_POINTS = 400
_NUM_BINS = 10
# Bins with fewer tokens are left out.
_MIN_TOKENS = 8


def figures_of(records: Records, target_records: Records, seed: int = 0) -> dict[str, Any]:
    """Correlation of the two overlaps, and the mean of one as a function of the other.

    Args:
        records: drafted tokens with the companion's S.
        target_records: the same tokens with the target in the companion's place.
        seed: seed of the sample of points to draw.
    """
    shown = np.random.default_rng(seed).permutation(len(records))[:_NUM_POINTS]
    bins = np.minimum((records.overlap * _NUM_BINS).astype(int), _NUM_BINS - 1)
    means = [
        float(target_records.overlap[bins == b].mean())
        if (bins == b).sum() >= _MIN_TOKENS
        else None
        for b in range(_NUM_BINS)
    ]
    return {
        "num_tokens": len(records),
        "pearson": pearson(records.overlap, target_records.overlap),
        "mean_companion": float(records.overlap.mean()),
        "mean_target": float(target_records.overlap.mean()),
        "by_companion": means,
        "points": {
            "companion": records.overlap[shown].tolist(),
            "target": target_records.overlap[shown].tolist(),
        },
    }


class Correlation(Study):
    """S(draft, companion) against S(draft, target)."""

    name = "correlation"
    title = "Does the companion agree where the target does?"
    source = SV
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Record drafts with every other model as companion."""
        s = bench.settings
        target = same_distribution(s.target)
        target_records = bench.collection(s.draft, target, target).records
        assert s.companion is not None
        companions = dict.fromkeys([s.companion, *s.models])
        return {
            "draft": s.draft,
            "companions": {
                name: figures_of(
                    bench.collection(s.draft, name, target).records, target_records, s.seed
                )
                for name in companions
                if name not in (s.draft, target)
            },
        }

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw drafted positions with the main companion, and the correlation of all companions."""
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

    def describe(self, data: Data) -> Description:
        """Describe the correlation for each companion."""
        values = {n: own["pearson"] for n, own in data["companions"].items()}
        said = ", ".join(f"{short_name(n)} {value:.2f}" for n, value in values.items())
        main = next(iter(values.values()))
        text = (
            f"Pearson's correlation of S(draft, companion) and S(draft, target) over drafted "
            f"positions, with the draft {data['draft']} and by companion: {said}."
        )
        return Description(
            text,
            [
                Finding.of(
                    "Draft and companion agree where draft and target do.",
                    f"Pearson's correlation {main:.2f} with the companion",
                    main > 0.5,
                ),
                Finding.of(
                    "The agreement holds for any companion of similar size.",
                    f"correlations from {min(values.values()):.2f} to {max(values.values()):.2f}",
                    [value > 0.5 for value in values.values()],
                ),
            ],
        )
