"""The token trees of EAGLE-2: a fixed depth and a fixed number of nodes, at any load."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.policies.base import Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition
from draftwise.policies.options import integer_option, number_option


class Eagle2(Policy):
    """Trees of a given depth, of which the most valuable nodes are verified.

    Li et al. 2024 (EAGLE-2, arXiv 2406.16858), section 4: at each depth the ``tree_width`` most
    valuable nodes get children, and of all nodes the ``num_speculative_tokens`` most valuable ones
    are verified. The paper's value of a node is the product of the draft's probabilities along its
    path. Here each probability is corrected by how often the draft was right.
    """

    name = "eagle2"
    summary = "token trees of a fixed depth and a fixed number of nodes"
    source = "Li et al. 2024, EAGLE-2: Faster Inference with Dynamic Draft Trees"
    verifies_trees = True

    def __init__(self, context: PolicyContext, depth: int = 6) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            depth: maximum number of tokens on a path, at least 1.
        """
        super().__init__(context)
        self._depth = integer_option("depth", depth, 1)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """All nodes up to the depth before the last. A chain is not longer than a tree."""
        return torch.full((len(position.requests),), position.index + 1 < self._depth)


class SvipTree(Eagle2):
    """EAGLE-2's trees without children of tokens from distributions with √H(q) > h.

    Zhang et al. 2024 (SVIP) report on EAGLE-2's trees without giving their rule. On a chain, SVIP
    stops after a token that was drawn from a distribution of high entropy. Here, such a token gets
    no children, and other branches go on.
    """

    name = "svip-tree"
    summary = "EAGLE-2's trees that stop after a token from a distribution of high entropy"
    source = "this project, after Zhang et al. 2024, Draft Model Knows When to Stop (SVIP)"
    signals = frozenset({Signal.ENTROPY})

    def __init__(self, context: PolicyContext, depth: int = 6, threshold: float = 0.77) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            depth: maximum number of tokens on a path, at least 1.
            threshold: h, at least 0; the square root of an entropy in nats.
        """
        super().__init__(context, depth)
        self._threshold = number_option("threshold", threshold, 0.0)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """√H(q) ≤ h, up to the depth before the last."""
        assert position.entropy is not None
        return (position.entropy.sqrt() <= self._threshold) & (position.index + 1 < self._depth)
