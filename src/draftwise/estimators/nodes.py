"""P(accept) of nodes of token trees of a draft model.

A node that is proposed with certainty is accepted if the target draws its token. A draft that
predicts the target perfectly would be right with probability q, its own probability of the token.
Others are right more or less often, which is learnt online.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwise.estimators.ratios import GroupRatio

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

# Smallest q of each group after the first.
_EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
# Weight of the initial factor of 1, in expected tokens.
_START_WEIGHT = 4.0
# Factor by which older observations of a group lose weight with each one.
_MEMORY = 0.999
LOWEST, HIGHEST = 1e-4, 0.995


class NodeAcceptance:
    """The acceptance of a node is its q times a factor, learnt online.

    The factor depends on q, and on whether the node is its parent's most likely child. It is a
    ratio of sums: accepted nodes over their q.
    """

    def __init__(self) -> None:
        """Start with a factor of 1 everywhere."""
        shape = 2, len(_EDGES) + 1
        weight = np.full(shape, _START_WEIGHT)
        self._factors = GroupRatio(weight, weight.copy())

    def predict(self, probs: Floats) -> Floats:
        """P(accept) of children of several nodes, if these nodes are accepted.

        Args:
            probs: ``[parents, children]`` the draft's probability of each child, the most likely
                one first.

        Returns:
            ``[parents, children]``. The children of a parent have at most 1 in all.
        """
        first = np.zeros(probs.shape, dtype=np.int64)
        first[:, 0] = 1
        factors = self._factors.mean(_groups(first, probs), 0.0, 0.0)
        found = np.clip(factors * probs, LOWEST, HIGHEST)
        most: Floats = found / np.maximum(found.sum(axis=1, keepdims=True), 1.0)
        return most

    def learn(self, is_first: Booleans, probs: Floats, right: Booleans) -> None:
        """Learn from nodes whose parents were accepted.

        Args:
            is_first: ``[nodes]`` whether each is its parent's most likely child.
            probs: ``[nodes]`` the draft's probability of each.
            right: ``[nodes]`` whether the target drew its token.
        """
        if len(probs):
            at = _groups(is_first.astype(np.int64), probs)
            self._factors.add(at, right.astype(np.float64), probs, _MEMORY)


def _groups(first: Integers, probs: Floats) -> tuple[Integers, ...]:
    """Rank and q of each node as indices."""
    return first, np.searchsorted(_EDGES, probs, side="right")
