"""P(accept) of nodes of token trees from a companion's scores.

The scores correct the draft's own estimate: the acceptance of a node is the estimate times a
factor, which is learnt online. It is a ratio of sums: accepted nodes over the sum of their
estimates. S is the overlap of the distributions of draft and companion at the node's parent, and A
the probability that the companion accepts the node's token.

Whether a drawn node is verified must not depend on its token. So there are two estimates for it:
one from S and its rank decides about the node, and one from S and A counts in the values of its
descendants.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwise.estimators.nodes import HIGHEST, LOWEST
from draftwise.estimators.ratios import GroupRatio

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

# Smallest S, and smallest A, of each group after the first.
_OVERLAP_EDGES = np.array([0.3, 0.5, 0.7, 0.8, 0.9, 0.96])
_AGREEMENT_EDGES = np.array([0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
# Weight of the initial factor of 1, in expected tokens.
_START_WEIGHT = 4.0
# Factor by which older observations of a group lose weight with each one.
_MEMORY = 0.999


class NodeScores:
    """Acceptance of scored nodes, relative to the draft's estimates."""

    def __init__(self) -> None:
        """Start with a factor of 1 everywhere."""
        overlaps, agreements = len(_OVERLAP_EDGES) + 1, len(_AGREEMENT_EDGES) + 1
        # Of nodes that are proposed with certainty, and of drawn ones.
        self._tokens = _ones(2, overlaps, agreements)
        # Of drawn nodes without their tokens: the first child of a node, and later ones.
        self._places = _ones(overlaps, 2)

    def by_token(
        self, estimates: Floats, overlap: Floats, agreement: Floats, drawn: Booleans
    ) -> Floats:
        """P(accept) of nodes whose tokens may be looked at, if their parents are accepted.

        Args:
            estimates: ``[nodes]`` the draft's estimate.
            overlap: ``[nodes]`` S; NaN for a node without scores.
            agreement: ``[nodes]`` A; NaN for a node without scores.
            drawn: ``[nodes]`` whether the node was drawn.
        """
        at = (
            drawn.astype(np.int64),
            _group(_OVERLAP_EDGES, overlap),
            _group(_AGREEMENT_EDGES, agreement),
        )
        return self._corrected(self._tokens, at, estimates, overlap)

    def by_place(self, estimates: Floats, overlap: Floats, ranks: Integers) -> Floats:
        """P(accept) of drawn nodes, whatever their tokens are, if their parents are accepted.

        Args:
            estimates: ``[nodes]`` the draft's estimate.
            overlap: ``[nodes]`` S; NaN for a node without scores.
            ranks: ``[nodes]`` number of siblings that were drawn before.
        """
        at = _group(_OVERLAP_EDGES, overlap), np.minimum(ranks, 1)
        return self._corrected(self._places, at, estimates, overlap)

    @staticmethod
    def _corrected(
        factors: GroupRatio, at: tuple[Integers, ...], estimates: Floats, overlap: Floats
    ) -> Floats:
        factor = np.where(np.isnan(overlap), 1.0, factors.mean(at, 0.0, 0.0))
        found: Floats = np.clip(factor * estimates, LOWEST, HIGHEST)
        return found

    def learn(
        self,
        estimates: Floats,
        overlap: Floats,
        agreement: Floats,
        ranks: Integers,
        drawn: Booleans,
        right: Booleans,
    ) -> None:
        """Learn from scored nodes of accepted parents. Of drawn ones, these are verified ones.

        Args:
            estimates, overlap, agreement: ``[nodes]`` as above, without NaN.
            ranks: ``[nodes]``.
            drawn: ``[nodes]`` whether the node was drawn.
            right: ``[nodes]`` whether it was accepted.
        """
        overlaps, agreements = _group(_OVERLAP_EDGES, overlap), _group(_AGREEMENT_EDGES, agreement)
        accepted = right.astype(np.float64)
        at = drawn.astype(np.int64), overlaps, agreements
        self._tokens.add(at, accepted, estimates, _MEMORY)
        places = overlaps[drawn], np.minimum(ranks[drawn], 1)
        self._places.add(places, accepted[drawn], estimates[drawn], _MEMORY)


def _group(edges: Floats, values: Floats) -> Integers:
    found: Integers = np.searchsorted(edges, np.nan_to_num(values), side="right")
    return found


def _ones(*shape: int) -> GroupRatio:
    weight = np.full(shape, _START_WEIGHT)
    return GroupRatio(weight, weight.copy())
