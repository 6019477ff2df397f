"""Tests of whether samples come from a distribution, and what they would have noticed.

Rounding makes the distributions of two correct servers differ a little. The tests allow for this:
a χ² divergence of δ between the two gives Pearson's statistic the noncentrality n · δ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
# Cells with fewer expected answers, or a smaller share of them, are pooled: many rare cells would
# hide a bias of the others.
FEWEST_EXPECTED, SMALLEST_SHARE = 10.0, 0.01
_ACCURACY = 1e-4
# More answers than this many times those that there are are not worth naming.
_MOST_TIMES = 1e4


@dataclass(frozen=True)
class Fit:
    """Result of a χ² test.

    Attributes:
        statistic: Pearson's statistic.
        num_cells: cells after pooling; 0 if an impossible outcome was seen.
        noncentrality: what rounding may add to the statistic.
        p_value: probability of a statistic that is at least as large.
        num_samples: answers of the server with speculation.
        power_samples: as many answers compared with an exact distribution notice as much.
    """

    statistic: float
    num_cells: int
    noncentrality: float
    p_value: float
    num_samples: int
    power_samples: float

    @property
    def is_impossible(self) -> bool:
        """Whether an outcome was seen that the distribution excludes."""
        return not self.num_cells

    def power(self, bias: float, level: float) -> float:
        """Probability that a bias is noticed.

        A bias of total variation δ between the cells gives a noncentrality of at least 4 n δ²:
        n Σ (p′ − p)²/p is smallest if the cells that gain have half of the probability.

        Args:
            bias: total variation.
            level: largest p-value that counts.
        """
        return self._power(bias, level, 1.0)

    def num_samples_for(self, bias: float, power: float, level: float) -> int | None:
        """Answers with which a bias is noticed with a probability; ``None`` for no number of them.

        Args:
            bias: total variation.
            power: probability of noticing it.
            level: largest p-value that counts.
        """
        low, high = 0.0, 1.0
        while self._power(bias, level, high) < power:
            low, high = high, 2 * high
            if high > _MOST_TIMES:
                return None
        while high - low > _ACCURACY * high:
            middle = (low + high) / 2
            enough = self._power(bias, level, middle) >= power
            low, high = (low, middle) if enough else (middle, high)
        return math.ceil(high * self.num_samples)

    def _power(self, bias: float, level: float, times: float) -> float:
        """Probability that a bias is noticed with so many times the answers."""
        if self.num_cells < 2:
            return 0.0
        noncentrality = times * self.noncentrality
        critical = _quantile(level, self.num_cells - 1, noncentrality)
        shift = 4 * times * self.power_samples * bias**2
        return _tail(critical, self.num_cells - 1, noncentrality + shift)

    def smallest_bias(self, power: float, level: float) -> float | None:
        """The smallest total variation that is noticed with a probability; ``None`` for none."""
        low, high = 0.0, 1.0
        if self.power(high, level) < power:
            return None
        while high - low > _ACCURACY:
            middle = (low + high) / 2
            low, high = (low, middle) if self.power(middle, level) >= power else (middle, high)
        return high


def fit_to_law(
    counts: Mapping[str, int], cells: Mapping[str, float], other: float, rounding: float
) -> Fit:
    """Test whether counts follow a distribution, by Pearson's χ² over pooled cells.

    Args:
        counts: how often each text was seen.
        cells: probability of each text.
        other: probability of all other texts.
        rounding: χ² divergence that is allowed.
    """
    total = sum(counts.values())
    observed = [counts.get(text, 0) for text in cells]
    seen = np.array([*observed, total - sum(observed)], dtype=np.float64)
    expected = np.array([*cells.values(), other]) * total
    if seen[expected == 0].any():
        return Fit(float("inf"), 0, 0.0, 0.0, total, total)
    seen, expected = pooled(seen, expected, expected)
    statistic = float(((seen - expected) ** 2 / expected)[expected > 0].sum())
    noncentrality = total * rounding
    p_value = _tail(statistic, len(seen) - 1, noncentrality)
    return Fit(statistic, len(seen), noncentrality, p_value, total, total)


def fit_to_samples(ours: Mapping[str, int], theirs: Mapping[str, int], rounding: float) -> Fit:
    """Test whether two samples come from the same distribution, by Pearson's χ² of homogeneity.

    Args:
        ours: how often each text was seen with speculation.
        theirs: the same without.
        rounding: χ² divergence that is allowed.
    """
    texts = sorted({*ours, *theirs})
    a = np.array([ours.get(text, 0) for text in texts], dtype=np.float64)
    b = np.array([theirs.get(text, 0) for text in texts], dtype=np.float64)
    num_a, num_b = float(a.sum()), float(b.sum())
    share = num_a / (num_a + num_b)
    a, both = pooled(a, a + b, (a + b) * min(share, 1 - share))
    b = both - a
    statistic = float(
        ((a - both * share) ** 2 / (both * share)).sum()
        + ((b - both * (1 - share)) ** 2 / (both * (1 - share))).sum()
    )
    effective = num_a * num_b / (num_a + num_b)
    noncentrality = effective * rounding
    p_value = _tail(statistic, len(both) - 1, noncentrality)
    return Fit(statistic, len(both), noncentrality, p_value, int(num_a), effective)


def together(fits: Sequence[Fit]) -> Fit:
    """Several tests of independent samples as one, whose statistic is the sum of theirs."""
    if any(fit.is_impossible for fit in fits):
        total = sum(fit.num_samples for fit in fits)
        return Fit(float("inf"), 0, 0.0, 0.0, total, total)
    statistic = sum(fit.statistic for fit in fits)
    degrees = sum(fit.num_cells - 1 for fit in fits)
    noncentrality = sum(fit.noncentrality for fit in fits)
    return Fit(
        statistic,
        degrees + 1,
        noncentrality,
        _tail(statistic, degrees, noncentrality),
        sum(fit.num_samples for fit in fits),
        sum(fit.power_samples for fit in fits if fit.num_cells > 1),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values that are corrected for their number (Holm 1979).

    If all hypotheses are true, the smallest is at most α with a probability of at most α.
    """
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def pooled(first: Floats, second: Floats, expected: Floats) -> tuple[Floats, Floats]:
    """Pool the cells with the smallest expected counts until all have enough.

    Args:
        first, second: ``[cells]`` counts that are pooled in the same way.
        expected: ``[cells]`` expected counts.
    """
    fewest = max(FEWEST_EXPECTED, SMALLEST_SHARE * float(expected.sum()))
    order = np.argsort(expected, kind="stable")
    first, second, expected = first[order], second[order], expected[order]
    num_rare = int(np.searchsorted(expected, fewest))
    while 0 < num_rare < len(expected) and expected[:num_rare].sum() < fewest:
        num_rare += 1
    if num_rare > 1:
        first = np.concatenate([[first[:num_rare].sum()], first[num_rare:]])
        second = np.concatenate([[second[:num_rare].sum()], second[num_rare:]])
    return first, second


def _tail(statistic: float, degrees: int, noncentrality: float) -> float:
    """Probability of a larger statistic; 1 with a single cell."""
    if degrees < 1:
        return 1.0
    if noncentrality <= 0:
        return float(stats.chi2.sf(statistic, degrees))
    return float(stats.ncx2.sf(statistic, degrees, noncentrality))


def _quantile(level: float, degrees: int, noncentrality: float) -> float:
    if noncentrality <= 0:
        return float(stats.chi2.isf(level, degrees))
    return float(stats.ncx2.isf(level, degrees, noncentrality))
