"""Ratios of sums, learnt online in groups."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class GroupRatio:
    """Accepted over expected tokens of several groups, with forgetting.

    Attributes:
        accepted, expected: ``[groups]`` sums.
    """

    def __init__(self, accepted: Floats, expected: Floats) -> None:
        """Start from given sums, of groups in any number of dimensions."""
        self.accepted, self.expected = accepted, expected

    def mean(self, at: tuple[Integers, ...], prior: Floats | float, weight: float) -> Floats:
        """The ratio at some groups, pulled towards a prior with the weight of expected tokens."""
        found: Floats = (self.accepted[at] + weight * prior) / (self.expected[at] + weight)
        return found

    def add(
        self, at: tuple[Integers, ...], accepted: Floats, expected: Floats, memory: float
    ) -> None:
        """Add tokens. ``memory`` is the factor on older observations of a group per token."""
        counts = np.zeros(self.accepted.shape)
        np.add.at(counts, at, 1.0)
        for total, added in ((self.accepted, accepted), (self.expected, expected)):
            total *= memory**counts
            np.add.at(total, at, added)
