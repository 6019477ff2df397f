"""One request's token tree while a draft model drafts it; see :mod:`token_trees`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from draftwise.core.trees import ROOT
from draftwise.engine.cached_model import NodeInput
from draftwise.engine.proposers.proposals import ProposedTree
from draftwise.models.tree_tokens import SegmentTree

# Number of depths among which the nodes of a drawn tree are divided.
_DRAWN_DEPTHS = 6
# Rank of a node that the draft model did not propose.
COPIED = -1


class Node(NamedTuple):
    """A drafted token in a tree.

    Attributes:
        token: id of the target.
        parent: index of its parent; -1 for the root.
        depth: number of tokens on the path to it, itself included.
        value: estimated probability that this path is accepted.
        prob: the draft's probability of the token. Of a drawn token, the largest probability of the
            distribution that it was drawn from.
        rank: number of its siblings that the model proposed before it; ``COPIED`` if the model did
            not propose it.
        entropy: entropy in nats of the distribution that it was taken from; 0 if not wanted.
        is_copied: whether it is a token of the known continuation.
    """

    token: int
    parent: int
    depth: int
    value: float
    prob: float
    rank: int
    entropy: float
    is_copied: bool = False


class CopiedToken(NamedTuple):
    """A token of a continuation that is known before the draft model runs.

    Attributes:
        token: id of the target.
        acceptance: estimated probability that it is accepted if all before it are.
    """

    token: int
    acceptance: float


class GrowingTree:
    """The token tree of one request.

    A continuation that is known before is a branch of the tree. At each depth its next token is the
    first child of the one before it, whether the model read that one or not.

    Attributes:
        index: index of the request in the batch.
        greedy: whether it is decoded at temperature 0.
        max_nodes: maximum number of nodes that are verified.
        nodes: the nodes in the order in which they were drafted.
        num_drawn: number of children that were drawn, also those that could not be.
    """

    def __init__(
        self,
        index: int,
        greedy: bool,
        max_nodes: int,
        room: int,
        copied: Sequence[CopiedToken] = (),
    ) -> None:
        """Start with the root.

        Args:
            index, greedy, max_nodes: see above.
            room: number of nodes that the draft model may read.
            copied: the continuation that is a branch of the tree, at most ``max_nodes`` tokens.
        """
        self.index, self.greedy, self.max_nodes = index, greedy, max_nodes
        self.nodes: list[Node] = []
        self.num_drawn = 0
        self._room = room
        self._copied = copied
        # Nodes of the copied tokens so far.
        self._branch: list[int] = []
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
        self._copy_next()

    def _copy_next(self) -> bool:
        """Add the next copied token. Returns whether there is one."""
        depth = len(self._branch)
        if depth == len(self._copied):
            return False
        token, acceptance = self._copied[depth]
        parent = self._branch[-1] if self._branch else ROOT
        value = self.value(parent) * acceptance
        self._branch.append(len(self.nodes))
        self.nodes.append(Node(token, parent, depth + 1, value, 1.0, COPIED, 0.0, True))
        return True

    def _depth(self, node: int) -> int:
        return 0 if node == ROOT else self.nodes[node].depth

    def copied_child(self, node: int) -> CopiedToken | None:
        """The copied token after a node."""
        depth = self._depth(node)
        if depth >= len(self._copied):
            return None
        last = self._branch[depth - 1] if depth else ROOT
        return self._copied[depth] if node == last else None

    def open_share(self, node: int) -> float:
        """Probability that no copied token is right after a node; 1 without one."""
        copied = self.copied_child(node)
        return 1.0 if copied is None else 1.0 - copied.acceptance

    def open_value(self, node: int) -> float:
        """Probability that the path to a node is accepted, and a copied token after it is not."""
        return self.value(node) * self.open_share(node)

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
            tokens: ``[children]``.
            probs: ``[children]`` the draft's probabilities; 0 for a token that is no child.
            estimates: ``[children]`` estimated acceptance of each if the parent is accepted.
            entropy: as in :class:`Node`.
        """
        value, depth = self.value(parent), self._depth(parent) + 1
        copied = self.copied_child(parent)
        for rank, (token, prob) in enumerate(zip(tokens, probs, strict=True)):
            own = value * estimates[rank]
            if copied is not None and token == copied.token:
                at = self._branch[depth - 1]
                own = max(self.nodes[at].value, own)
                merged = self.nodes[at]._replace(value=own, prob=prob, rank=rank, entropy=entropy)
                self.nodes[at] = merged
            elif prob > 0:
                self.nodes.append(Node(token, parent, depth, own, prob, rank, entropy))

    def best_newest(self, width: int) -> list[int]:
        """The best nodes of the newest depth, whose children may be worth verifying.

        Args:
            width: maximum number of nodes.
        """
        # A copied token may follow one that the model did not read.
        every = range(self._newest, len(self.nodes))
        newest = [node for node in every if self.nodes[node].parent in self._rows]
        if not newest or self.nodes[-1].depth >= self.max_nodes:
            return []
        if not self.greedy and not self._num_to_draw:
            return []
        # A node has less value than its parent. So no child of a node is verified that is not
        # among the most valuable nodes itself.
        least = 0.0
        if self.greedy and len(self.nodes) > self.max_nodes:
            least = heapq.nlargest(self.max_nodes, (node.value for node in self.nodes))[-1]
        best = heapq.nlargest(min(width, self._room), newest, key=self.open_value)
        return sorted(node for node in best if self.value(node) >= least)

    @property
    def _num_to_draw(self) -> int:
        """How many nodes of a drawn tree are left, beside the copied ones."""
        return max(0, self.max_nodes - len(self._copied) - self.num_drawn)

    def children_to_draw(
        self, nodes: Sequence[int], estimates: Sequence[Sequence[float]], least: float
    ) -> list[int]:
        """``[nodes]`` how many children each node gets, before they are drawn.

        The nodes that may still be verified are divided among the depths, and those of a depth go
        to the most valuable children.

        Args:
            nodes: the nodes.
            estimates: ``[nodes][rank]`` estimated acceptance of each child; 0 for no child.
            least: minimum value of a child.
        """
        depth = self._depth(nodes[0])
        quota = -(-self._num_to_draw // max(1, _DRAWN_DEPTHS - depth))
        children = [
            (self.value(node) * estimate, at)
            for at, node in enumerate(nodes)
            for estimate in estimates[at]
        ]
        counts = [0] * len(nodes)
        for value, at in heapq.nlargest(quota, children):
            if value >= least and value > 0:
                counts[at] += 1
        return counts

    def stop(self) -> None:
        """No node gets children any more."""
        self._newest = len(self.nodes)

    def read(self, nodes: Sequence[int], cache_slot: int, length: int) -> NodeInput:
        """What the model reads to propose the children of some nodes of the newest depth.

        Args:
            nodes: the nodes.
            cache_slot: cache slot of the request.
            length: number of tokens in it.
        """
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

    def order(self) -> list[int]:
        """The nodes to propose: parents before children, the most valuable ones first.

        Drawn trees stay whole, in the order in which they were drawn. Copied tokens that the growth
        did not reach are added at the end.
        """
        while self._copy_next():
            pass
        order = list(range(len(self.nodes)))
        if self.greedy:
            order.sort(key=lambda node: -self.nodes[node].value)
            order = order[: self.max_nodes]
        return order

    def proposed(self, order: Sequence[int]) -> ProposedTree:
        """The tree of the nodes of :meth:`order`."""
        places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
        chosen = [self.nodes[node] for node in order]
        return ProposedTree(
            [node.token for node in chosen],
            [places[node.parent] for node in chosen],
            sorted((node.value for node in chosen), reverse=True),
            frozenset(place for place, node in enumerate(chosen) if node.is_copied),
        )
