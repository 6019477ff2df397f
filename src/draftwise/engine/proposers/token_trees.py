"""Token trees of a draft model: its most likely tokens at each node, one pass per depth.

The children of a node are proposed with certainty. So the text is lossless whichever nodes are
drafted and verified, as long as this is decided before the target's tokens are drawn (law (a) of
:mod:`draftwise.core.trees`). The best nodes of each depth get children, as in EAGLE-2 (Li et al.
2024, arXiv 2406.16858, section 4.1). The value of a node is the estimated probability that its path
is accepted, and the most valuable nodes come first in the draft (section 4.2).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.trees import ROOT
from draftwise.engine.cached_model import CachedModel, NodeInput
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.request import Request
from draftwise.engine.tree_paths import known_nodes
from draftwise.estimators.nodes import NodeAcceptance
from draftwise.models.transfer import fetch, upload
from draftwise.models.tree_tokens import MAX_TREE_TOKENS, SegmentTree
from draftwise.policies.base import Policy, TreeLevel

Floats = NDArray[np.float64]


class _Children(NamedTuple):
    """The most likely next tokens at some rows.

    Attributes:
        tokens: ``[rows, width]`` ids of the target.
        probs: ``[rows, width]`` the draft's probabilities, descending; 0 for no child.
        entropy: ``[rows]`` entropy of each distribution in nats; ``None`` if not wanted.
    """

    tokens: list[list[int]]
    probs: Floats
    entropy: Floats | None


class _Node(NamedTuple):
    """A drafted token in a tree.

    Attributes:
        token: id of the target.
        parent: index of its parent; -1 for the root.
        depth: number of tokens on the path to it, itself included.
        value: estimated probability that this path is accepted.
        prob: the draft's probability of the token.
        is_first: whether it is its parent's most likely child.
        entropy: entropy in nats of the distribution that it was taken from; 0 if not wanted.
    """

    token: int
    parent: int
    depth: int
    value: float
    prob: float
    is_first: bool
    entropy: float


class _Tree:
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
        self.nodes: list[_Node] = []
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
            tokens: ``[children]``.
            probs: ``[children]`` the draft's probabilities; 0 for a token that is no child.
            estimates: ``[children]`` estimated acceptance of each if the parent is accepted.
            entropy: as in :class:`_Node`.
        """
        value = self.value(parent)
        depth = 1 if parent == ROOT else self.nodes[parent].depth + 1
        for rank, (token, prob) in enumerate(zip(tokens, probs, strict=True)):
            if prob > 0:
                node = _Node(token, parent, depth, value * estimates[rank], prob, not rank, entropy)
                self.nodes.append(node)

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

    def most_valuable(self) -> list[int]:
        """The nodes to propose: parents before children, the most valuable ones first."""
        order = sorted(range(len(self.nodes)), key=lambda node: (-self.nodes[node].value, node))
        return order[: self.max_nodes]


class TreeDrafting:
    """Drafts token trees with a model, and learns how often its tokens are right."""

    def __init__(self, model: CachedModel, width: int) -> None:
        """Set up.

        Args:
            model: the draft model.
            width: maximum number of children of a node, and of nodes of one depth that get
                children.
        """
        self._model, self._width = model, width
        self._acceptance = NodeAcceptance()
        self._drafted: list[tuple[Request, int, _Tree]] = []

    @torch.inference_mode()
    def draft(self, step: DraftingStep, policy: Policy) -> tuple[Proposals, tuple[int, ...]]:
        """Draft trees.

        Args:
            step: the step. Its limits are the maximum numbers of verified nodes.
            policy: decides which nodes get children.

        Returns:
            The proposed trees, and the number of tokens in each pass of the model.
        """
        model, requests = self._model, step.batch.generating
        self._drafted = []
        if not step.active:
            model.read(step.inputs)
            return Proposals.nothing(len(step.limits)), ()
        signals = policy.uses_draft_signals()
        trees = []
        for index in step.active:
            request = requests[index]
            room = min(model.room(request), MAX_TREE_TOKENS - 1, model.cache.max_new_tokens - 1)
            greedy = request.params.temperature == 0
            trees.append(_Tree(index, greedy, step.limits[index], room))
            self._drafted.append((request, len(request.tokens), trees[-1]))
        logits = model.read_roots(step.inputs)
        passes = [len(trees)]
        reading: list[tuple[_Tree, list[int]]] = [(tree, [ROOT]) for tree in trees]
        while True:
            coverage = self._add_children(step, logits, reading, signals)
            reading = self._next_nodes(policy, trees, coverage, signals)
            if not reading:
                return _proposals(trees, len(step.limits)), tuple(passes)
            logits = model.read_nodes(self._inputs(step, reading))
            passes.append(len(logits))

    def learn(self, commit: Commit) -> None:
        """Compare the drafted trees with the tokens that the requests gained.

        The gained tokens follow the target's distribution, whatever was verified. So all children
        of the nodes on their path are learnt from.
        """
        if not self._drafted or not any(r is self._drafted[0][0] for r in commit.requests):
            return
        greedy, is_first, probs, right = [], [], [], []
        for request, start, tree in self._drafted:
            nodes = tree.nodes
            tokens, parents = [node.token for node in nodes], [node.parent for node in nodes]
            known, accepted = known_nodes(tokens, parents, request.tokens[start:])
            greedy += [tree.greedy] * len(known)
            is_first += [nodes[at].is_first for at in known]
            probs += [nodes[at].prob for at in known]
            right += accepted
        self._drafted = []
        self._acceptance.learn(*map(np.array, (greedy, is_first, probs, right)))

    def forget(self) -> None:
        """A step failed. Nothing is learnt from it."""
        self._drafted = []

    def _add_children(
        self,
        step: DraftingStep,
        logits: Tensor,
        reading: Sequence[tuple[_Tree, list[int]]],
        signals: bool,
    ) -> float:
        """Add the children of the nodes that were read.

        Returns:
            The mean estimated probability that the target's token is among the children of a node
            that it reaches.
        """
        owners = [tree.index for tree, nodes in reading for _ in nodes]
        temperature = step.batch.controls.temperature[upload(owners, torch.long, logits.device)]
        found = self._children(logits, temperature, signals)
        greedy = np.array([tree.greedy for tree, nodes in reading for _ in nodes])
        estimates = self._acceptance.predict(greedy, found.probs)
        probs, rows = found.probs.tolist(), estimates.tolist()
        entropy = [0.0] * len(owners) if found.entropy is None else found.entropy.tolist()
        row, total, covered = 0, 0.0, 0.0
        for tree, nodes in reading:
            tree.was_read(nodes, row)
            for node in nodes:
                tree.add(node, found.tokens[row], probs[row], rows[row], entropy[row])
                total += tree.value(node)
                covered += tree.value(node) * sum(rows[row])
                row += 1
        return covered / total if total else 0.0

    def _children(self, logits: Tensor, temperature: Tensor, signals: bool) -> _Children:
        """The most likely tokens of each row; greedy rows have temperature 1."""
        scores = logits.float()
        if bool((temperature > 0).any()):
            scores = scores / torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
        top, tokens = scores.topk(min(self._width, scores.shape[1]), dim=1)
        total = scores.logsumexp(dim=1, keepdim=True)
        probs = (top - total).exp().nan_to_num(nan=0.0)
        entropy = None
        if signals:
            p = (scores - total).exp()
            entropy = torch.special.entr(p).sum(dim=1).nan_to_num(nan=0.0)
            entropy = fetch(entropy)[0].double().numpy()
        tokens, probs = fetch(self._model.target_tokens(tokens), probs)
        return _Children(tokens.tolist(), probs.double().numpy(), entropy)

    def _next_nodes(
        self, policy: Policy, trees: Sequence[_Tree], coverage: float, signals: bool
    ) -> list[tuple[_Tree, list[int]]]:
        """The nodes that get children next, in order of cache slot."""
        best = [(tree, tree.best_newest(self._width)) for tree in trees]
        found = [(tree, node) for tree, nodes in best for node in nodes]
        if not found:
            return []
        chosen = [tree.nodes[node] for tree, node in found]
        level = TreeLevel(
            chosen[0].depth,
            [tree.index for tree, _ in found],
            np.array([node.value for node in chosen]),
            np.array([node.entropy for node in chosen]) if signals else None,
            coverage,
        )
        grows = policy.grow_trees(level)
        if grows is not None:
            kept = iter(grows.tolist())
            best = [(tree, [node for node in nodes if next(kept)]) for tree, nodes in best]
        for tree, nodes in best:
            if not nodes:
                tree.stop()
        return [(tree, nodes) for tree, nodes in best if nodes]

    def _inputs(
        self, step: DraftingStep, reading: Sequence[tuple[_Tree, list[int]]]
    ) -> list[NodeInput]:
        lengths, inputs = self._model.cache.lengths, []
        for tree, nodes in reading:
            slot = step.cache_slots[tree.index]
            inputs.append(tree.read(nodes, slot, lengths[slot]))
        return inputs


def _proposals(trees: Sequence[_Tree], num_requests: int) -> Proposals:
    """The most valuable nodes of each tree."""
    orders = [tree.most_valuable() for tree in trees]
    width = max(map(len, orders), default=0)
    made = Proposals.nothing(num_requests, width)
    parents = np.full(made.tokens.shape, ROOT, dtype=np.int64)
    for tree, order in zip(trees, orders, strict=True):
        row, count = tree.index, len(order)
        places = {node: place for place, node in enumerate(order)} | {ROOT: ROOT}
        made.lengths[row] = count
        made.tokens[row, :count] = [tree.nodes[node].token for node in order]
        parents[row, :count] = [places[tree.nodes[node].parent] for node in order]
        values = np.array([1.0, *(tree.nodes[node].value for node in order)])
        made.acceptance[row, :count] = values[1:] / values[:-1]
    return made._replace(parents=parents)
