"""Token trees, and the law that verifies them without changing the target's distribution.

A tree's root is the request's last token. Its nodes are drafted tokens, and a node's children are
alternatives for the token after it. Node *i* is verified with the target's distribution p after the
path to it.

The law walks from the root towards a leaf: draw x from p at the node. If x is a child, go there;
otherwise emit x. The emitted text has distribution p for every tree that is chosen before x is
drawn, whatever its nodes are. The expected number of accepted tokens is the sum over the nodes of
the probability of their paths under p. No other law accepts more of a given tree.

Shapes: ``batch`` is the number of requests, ``nodes`` the largest number of nodes. Parents come
before their children.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = -1


class AcceptedPath(NamedTuple):
    """The path that was accepted in each tree.

    Attributes:
        nodes: ``[batch, nodes]`` int64, indices of the accepted nodes from the root on; ``ROOT``
            after the last.
        num_accepted: ``[batch]`` int64, number of accepted nodes.
        next_tokens: ``[batch]`` int64, the token that follows the path.
    """

    nodes: Tensor
    num_accepted: Tensor
    next_tokens: Tensor


def check_parents(parents: Sequence[int]) -> None:
    """Check that the parents of one tree come before their children.

    Raises:
        ValueError: names the first node whose parent does not come before it.
    """
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ValueError(f"parents[{node}] must be between -1 and {node - 1}, got {parent}")


def accept_drawn_path(
    tokens: Tensor, parents: Tensor, lengths: Tensor, drawn: Tensor
) -> AcceptedPath:
    """Follow the tokens that were drawn from the target.

    Args:
        tokens: ``[batch, nodes]`` int64 drafted tokens.
        parents: ``[batch, nodes]`` int64 parents, -1 for the root.
        lengths: ``[batch]`` int64 number of verified nodes.
        drawn: ``[batch, nodes + 1]`` int64 token drawn from p at the root and at each node.
    """
    walk = _Walk(len(tokens), tokens.shape[1], tokens.device)
    for node in range(tokens.shape[1]):
        here = drawn.gather(1, walk.at.unsqueeze(1) + 1).squeeze(1)
        is_child = (parents[:, node] == walk.at) & (node < lengths)
        walk.go(node, is_child & (here == tokens[:, node]))
    return walk.end(drawn.gather(1, walk.at.unsqueeze(1) + 1).squeeze(1))


class _Walk:
    """The accepted path of each tree so far.

    Attributes:
        at: ``[batch]`` the last accepted node; ``ROOT`` before the first.
    """

    def __init__(self, batch: int, nodes: int, device: torch.device) -> None:
        self.at = torch.full((batch,), ROOT, dtype=torch.long, device=device)
        self._count = torch.zeros(batch, dtype=torch.long, device=device)
        self._nodes = torch.full((batch, nodes), ROOT, dtype=torch.long, device=device)

    def go(self, node: int, accepted: Tensor) -> None:
        """Accept a node in some trees, ``[batch]`` bool."""
        self.at = torch.where(accepted, node, self.at)
        (rows,) = accepted.nonzero(as_tuple=True)
        self._nodes[rows, self._count[rows]] = node
        self._count += accepted

    def end(self, next_tokens: Tensor) -> AcceptedPath:
        """The result."""
        return AcceptedPath(self._nodes, self._count, next_tokens)
