"""P̂(accept | S, A) as a surface.

Recomputes SV's acceptance surface (Kim et al. 2025): the fraction of tested tokens that are
accepted, over bins of S and A. The source found that acceptance rises with S and with A, and most
strongly with A where S is large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.estimators.information import was_tested
from draftwise.estimators.records import Records
from draftwise.studies.drawing import heat_map, panels, styled
from draftwise.studies.study import SV, Data, Description, Finding, Study, too_few_tokens
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_BINS = 8
# Cells with fewer records are left empty.
_MIN_TOKENS = 8


def surface(records: Records, num_bins: int = _NUM_BINS) -> dict[str, Any]:
    """Mean acceptance and count of tested tokens in equal bins: rows along S, columns along A."""
    tested = records.take(was_tested(records))
    row, column = (
        np.minimum((values * num_bins).astype(int), num_bins - 1)
        for values in (tested.overlap, tested.agreement)
    )
    cell = row * num_bins + column
    shape = num_bins, num_bins
    counts = np.bincount(cell, minlength=num_bins**2)
    sums = np.bincount(cell, tested.acceptance, minlength=num_bins**2)
    means = np.where(counts >= _MIN_TOKENS, sums / np.maximum(counts, 1), np.nan)

    def along(bins: Any) -> list[float | None]:
        number = np.bincount(bins, minlength=num_bins)
        total = np.bincount(bins, tested.acceptance, minlength=num_bins)
        return [
            float(t / n) if n >= _MIN_TOKENS else None for t, n in zip(total, number, strict=True)
        ]

    by_overlap, by_agreement = along(row), along(column)
    if any(all(mean is None for mean in means) for means in (by_overlap, by_agreement)):
        raise too_few_tokens(f"{_MIN_TOKENS} tokens in a bin")
    return {
        "num_tokens": len(tested),
        "num_bins": num_bins,
        "acceptance": float(tested.acceptance.mean()),
        "means": [[None if np.isnan(v) else float(v) for v in r] for r in means.reshape(shape)],
        "counts": counts.reshape(shape).tolist(),
        "by_overlap": by_overlap,
        "by_agreement": by_agreement,
    }


def share_rising(values: list[float | None]) -> float:
    """Fraction of adjacent steps that do not fall by more than 0.02; 1 if there are none."""
    known = [value for value in values if value is not None]
    steps = np.diff(known)
    return float((steps > -0.02).mean()) if len(steps) else 1.0


class AcceptanceSurface(Study):
    """P̂ over S × A."""

    name = "acceptance-surface"
    title = "Acceptance over S and A"
    source = SV
    needs_companion = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Compute the surface from recorded drafts."""
        return surface(bench.collection().records)

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw heat maps of means and counts."""
        figure, (means, counts) = panels(2, width=4.6, height=3.8)
        size = data["num_bins"]
        names = [f"{(i + 0.5) / size:.2f}" for i in range(size)]
        heat_map(means, data["means"], names, names, "mean acceptance", limits=(0.0, 1.0))
        logs = [[np.log10(n) if n else None for n in row] for row in data["counts"]]
        heat_map(counts, logs, names, names, "tokens, log10", digits=1)
        for axes in (means, counts):
            axes.set_xlabel("A, centre of the bin")
            axes.set_ylabel("S, centre of the bin")
            axes.invert_yaxis()
        return figure

    def describe(self, data: Data) -> Description:
        """Describe how acceptance depends on S and A."""
        s, a = data["by_overlap"], data["by_agreement"]
        known_s, known_a = ([v for v in each if v is not None] for each in (s, a))
        text = (
            f"{data['num_tokens']} tested tokens have a mean acceptance of "
            f"{data['acceptance']:.2f}. From the lowest to the highest bin, it rises from "
            f"{known_s[0]:.2f} to {known_s[-1]:.2f} along S and from {known_a[0]:.2f} to "
            f"{known_a[-1]:.2f} along A. Cells with fewer than {_MIN_TOKENS} tokens are empty."
        )
        findings = [
            Finding.of(
                "Acceptance rises with S and with A.",
                f"it does not fall in {share_rising(s):.0%} of the steps along S and "
                f"{share_rising(a):.0%} along A",
                [share_rising(s) > 0.8, share_rising(a) > 0.8],
            )
        ]
        rows = [[v for v in row if v is not None] for row in data["means"]]
        rows = [row for row in rows if len(row) > 2]
        if len(rows) > 1:
            low, high = (row[-1] - row[0] for row in (rows[0], rows[-1]))
            findings.append(
                Finding.of(
                    "The larger S is, the more acceptance depends on A.",
                    f"along A, acceptance rises by {low:.2f} at the lowest S with enough tokens "
                    f"and by {high:.2f} at the highest",
                    high > low,
                )
            )
        return Description(text, findings)
