"""One request's token tree while a draft model drafts it; see :mod:`token_trees`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from draftwise.core.trees import ROOT
from draftwise.engine.cached_model import NodeInput
from draftwise.engine.proposers.proposals import ProposedTree
from draftwise.models.tree_tokens import SegmentTree


class Node(NamedTuple):
    """A drafted token in a tree.

    Attributes:
        token: id of the target.
        parent: index of its parent; -1 for the root.
        depth: number of tokens on the path to it, itself included.
        value: estimated probability that this path is accepted.
        prob: the draft's probability of the token.
        rank: number of its siblings that are more likely.
        entropy: entropy in nats of the distribution that it was taken from; 0 if not wanted.
    """

    token: int
    parent: int
    depth: int
    value: float
    prob: float
    rank: int
    entropy: float


class GrowingTree:
    """The token tree of one request.

    Attributes:
        index: index of the request in the batch.
        greedy: whether it is decoded at temperature 0.
        max_nodes: maximum number of nodes that are verified.
        nodes: the nodes in the order in which they were drafted.
    """

    def __init__(self, index: int, greedy: bool, max_nodes: int, room: int) -> None:
        """Start with the root.

        Args:
            index, greedy, max_nodes: see above.
            room: number of nodes that the draft model may read.
        """
        self.index, self.greedy, self.max_nodes = index, greedy, max_nodes
        self.nodes: list[Node] = []
        self._room = room
        # Index of the first node of the newest depth.
        self._newest = 0
        # Of the root and of each node that was read, the tokens that it attends to.
        self._ancestors = {ROOT: 1}
        # Rows of the newest pass.
        self._rows: dict[int, int] = {}

    def value(self, node: int) -> float:
        """The value of a node; 1 for the root."""
        return 1.0 if node == ROOT else self.nodes[node].value

    def was_read(self, nodes: Sequence[int], first_row: int) -> None:
        """Begin a depth: the model has read some nodes.

        Args:
            nodes: the nodes.
            first_row: the first row of the pass that belongs to them.
        """
        self._rows = {node: row for row, node in enumerate(nodes, first_row)}
        self._newest = len(self.nodes)

    def add(
        self,
        parent: int,
        tokens: Sequence[int],
        probs: Sequence[float],
        estimates: Sequence[float],
        entropy: float,
    ) -> None:
        """Add the children of a node.

        Args:
            parent: the node.
            tokens: ``[children]`` the most likely first.
            probs: ``[children]`` the draft's probabilities; 0 for a token that is no child.
            estimates: ``[children]`` estimated acceptance of each if the parent is accepted.
            entropy: as in :class:`Node`.
        """
        value = self.value(parent)
        depth = 1 if parent == ROOT else self.nodes[parent].depth + 1
        for rank, (token, prob, estimate) in enumerate(zip(tokens, probs, estimates, strict=True)):
            if prob > 0:
                self.nodes.append(Node(token, parent, depth, value * estimate, prob, rank, entropy))

    def best_newest(self, width: int) -> list[int]:
        """The best nodes of the newest depth, whose children may be worth verifying.

        Args:
            width: maximum number of nodes.
        """
        newest = range(self._newest, len(self.nodes))
        if not newest or self.nodes[-1].depth >= self.max_nodes:
            return []
        # A node has less value than its parent. So no child of a node is verified that is not
        # among the most valuable nodes itself.
        least = 0.0
        if len(self.nodes) > self.max_nodes:
            least = heapq.nlargest(self.max_nodes, (node.value for node in self.nodes))[-1]
        best = heapq.nlargest(min(width, self._room), newest, key=self.value)
        return sorted(node for node in best if self.value(node) >= least)

    def stop(self) -> None:
        """No node gets children any more."""
        self._newest = len(self.nodes)

    def read(self, nodes: Sequence[int], cache_slot: int, length: int) -> NodeInput:
        """What the model reads to propose the children of some nodes of the newest depth."""
        offset, chosen = len(self._ancestors), [self.nodes[node] for node in nodes]
        for place, node in enumerate(nodes, offset):
            self._ancestors[node] = self._ancestors[self.nodes[node].parent] | 1 << place
        self._room -= len(nodes)
        tree = SegmentTree(
            length - offset,
            [node.depth for node in chosen],
            [self._ancestors[node] for node in nodes],
        )
        rows = [self._rows[node.parent] for node in chosen]
        return NodeInput(cache_slot, [node.token for node in chosen], tree, rows)

    def proposed(self) -> ProposedTree:
        """The most valuable nodes, in the order of their values, parents before children."""
        order = sorted(range(len(self.nodes)), key=lambda node: -self.nodes[node].value)
        order = order[: self.max_nodes]
        places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
        chosen = [self.nodes[node] for node in order]
        return ProposedTree(
            [node.token for node in chosen],
            [places[node.parent] for node in chosen],
            [node.value for node in chosen],
        )
