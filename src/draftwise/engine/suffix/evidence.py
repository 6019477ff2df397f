"""The evidence from which the acceptance of found continuations is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.models.native.suffix import FoundContinuations

Integers = NDArray[np.int64]


class Evidence(NamedTuple):
    """What :class:`draftwise.estimators.matches.MatchAcceptance` uses for the requests of a step.

    Attributes:
        greedy, shares, votes, match_lengths, from_corpus: see its ``predict``.
    """

    greedy: NDArray[np.bool_]
    shares: NDArray[np.float64]
    votes: Integers
    match_lengths: Integers
    from_corpus: NDArray[np.bool_]

    @classmethod
    def of(cls, greedy: Sequence[bool], found: FoundContinuations) -> Evidence:
        """The evidence of found continuations.

        Args:
            greedy: ``[batch]`` whether each request is decoded at temperature 0.
            found: the continuations of these requests.
        """
        return cls(
            np.array(greedy, dtype=bool),
            found.shares,
            found.votes,
            found.match_lengths,
            found.chunks >= 0,
        )
