"""P(accept) of tokens that continue a text like an earlier occurrence of its last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Smallest match length of each group of lengths.
_GROUPS = np.array([1, 2, 3, 4, 6, 9, 14, 20])
# Initial acceptance at a share of 1, for sampled and for greedy requests. Observations replace it.
_START = np.array(
    [
        [0.15, 0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.85],
        [0.25, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92, 0.95],
    ]
)
# Weight of the initial values, as a number of verified tokens.
_START_WEIGHT = 8.0
# Factor by which older observations lose weight with each verified token of a group.
_MEMORY = 0.995
LOWEST, HIGHEST = 0.01, 0.995


class MatchAcceptance:
    """The acceptance of a token is its share of the votes times a factor, learnt online.

    The factor depends on the length of the match at the token: the match before the draft, and the
    drafted tokens before the token. It is estimated as a ratio of sums, accepted tokens over the
    shares of verified ones, separately for sampled and for greedy requests.
    """

    def __init__(self) -> None:
        """Start from the initial values."""
        self._accepted = _START * _START_WEIGHT
        self._shares = np.full(_START.shape, _START_WEIGHT)

    def predict(self, shares: Floats, match_lengths: Integers, greedy: NDArray[np.bool_]) -> Floats:
        """``[batch, width]`` P(accept) of each token, if all tokens before it are accepted.

        Args:
            shares: ``[batch, width]`` share of the votes of each token.
            match_lengths: ``[batch]`` length of the match before the first token.
            greedy: ``[batch]`` whether each request is decoded at temperature 0.
        """
        factors = self._accepted / self._shares
        groups = _groups(match_lengths[:, None] + np.arange(shares.shape[1]))
        found: Floats = factors[greedy.astype(np.int64)[:, None], groups] * shares
        return np.clip(found, LOWEST, HIGHEST)

    def learn(
        self, shares: Sequence[float], match_length: int, greedy: bool, num_accepted: int
    ) -> None:
        """Learn from one request's verified tokens.

        Args:
            shares: share of the votes of each verified token, up to the first rejected one.
            match_length: length of the match before the first token.
            greedy: whether the request is decoded at temperature 0.
            num_accepted: number of accepted tokens among them.
        """
        groups = _groups(match_length + np.arange(len(shares)))
        for place, (share, group) in enumerate(zip(shares, groups, strict=True)):
            at = int(greedy), group
            self._accepted[at] = _MEMORY * self._accepted[at] + (place < num_accepted)
            self._shares[at] = _MEMORY * self._shares[at] + share


def _groups(lengths: Integers) -> Integers:
    """The group of each match length."""
    found: Integers = np.searchsorted(_GROUPS, np.maximum(lengths, 1), side="right") - 1
    return found
