"""Token trees of a draft model, one pass per depth.

The best nodes of each depth get children, as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section
4.1). The value of a node is the estimated probability that its path is accepted.

At temperature 0 the children of a node are the draft's most likely tokens, proposed with certainty.
The text is then lossless whichever nodes are drafted and verified, as long as this is decided
before the target's tokens are drawn (the first law of :mod:`draftwise.core.trees`). The most
valuable nodes are verified.

At other temperatures the children are drawn without replacement, and the second law applies. How
many children a node has is decided before they are drawn, from the path to it and from the draft's
distribution. The value of a child is then about its rank and not about its token. All nodes that
were drawn are verified, unless a companion scores them.

A continuation that is known before the model runs may be a branch of the tree. Its tokens are
proposed with certainty in both cases. Each is its parent's first child, and siblings are drawn from
what the draft's distribution has beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.trees import ROOT, draw_children
from draftwise.core.types import TreeProbs, TreeSignals
from draftwise.engine.cached_model import CachedModel, NodeInput
from draftwise.engine.distributions import row_probabilities
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.drafted_trees import (
    DraftedTrees,
    all_trees,
    chain_of,
    worth_verifying,
)
from draftwise.engine.proposers.growing_tree import COPIED, CopiedToken, GrowingTree, Node
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.request import Request
from draftwise.engine.tree_paths import known_nodes
from draftwise.estimators.nodes import NodeAcceptance, RankAcceptance
from draftwise.models.transfer import fetch, upload
from draftwise.models.tree_tokens import MAX_TREE_TOKENS
from draftwise.policies.base import Policy, TreeLevel

Floats = NDArray[np.float64]

# Probability that a child of a root is accepted, before any tree was drafted, and the weight of a
# step in its mean.
_FIRST_COVERAGE, _COVERAGE_WEIGHT = 0.7, 0.05
# The model grows a tree after so many steps without one, to be measured.
_LONGEST_REST = 64

# Smallest probability of a drawn token, for the estimates.
_LEAST_PROB = 1e-30


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


class _Distributions(NamedTuple):
    """What the children of nodes of drawn trees are drawn from: q without a copied token.

    Attributes:
        probs: ``[rows, own vocab]``; ``None`` without such nodes.
        rows: by row of the logits, the row of ``probs``.
        largest: ``[rows of the logits]`` largest probability; 0 for nodes of other trees.
        support: ``[rows of the logits]`` number of tokens that have a probability.
    """

    probs: Tensor | None
    rows: dict[int, int]
    largest: Floats
    support: NDArray[np.int64]


# A tree, and nodes of it that the model has read or reads next.
_Reading: TypeAlias = tuple[GrowingTree, list[int]]


class _Drawing(NamedTuple):
    """Children of one node that are drawn.

    Attributes:
        tree: the tree.
        node: the node.
        row: row of the distribution that they are drawn from.
        values: estimated acceptance of each child.
        largest: largest probability of the distribution, without a copied token.
        entropy: entropy of the distribution.
    """

    tree: GrowingTree
    node: int
    row: int
    values: list[float]
    largest: float
    entropy: float


class _Growth:
    """The trees of a step while they grow.

    Attributes:
        step: the step.
        policy: decides which nodes get children.
        signals: whether the policy uses the entropy of the draft.
        trees: all trees.
        parts: distributions that children were drawn from, ``[rows, own vocab]`` each.
        rows: by request, the row of each drawn node.
        known: distributions at all nodes that were read, ``[rows, own vocab]`` each; ``None`` if no
            companion scores the trees.
        known_rows: by request, the row of each node that was read.
    """

    def __init__(
        self, step: DraftingStep, policy: Policy, signals: bool, trees: list[GrowingTree]
    ) -> None:
        self.step, self.policy, self.signals, self.trees = step, policy, signals, trees
        self.parts: list[Tensor] = []
        self.rows: dict[int, dict[int, int]] = {}
        self.known: list[Tensor] | None = [] if policy.wants_companion() else None
        self.known_rows: dict[int, dict[int, int]] = {tree.index: {} for tree in trees}

    def remember(
        self, logits: Tensor, temperature: Tensor, q: _Distributions, reading: Sequence[_Reading]
    ) -> None:
        """Keep the distributions at nodes that were read: q, and softmax for greedy requests."""
        if self.known is None:
            return
        scale = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
        probs = (logits.float() / scale).softmax(dim=1).nan_to_num(nan=0.0)
        if q.probs is not None:
            probs[upload(list(q.rows), torch.long, probs.device)] = q.probs
        row = sum(map(len, self.known))
        self.known.append(probs)
        for tree, nodes in reading:
            self.known_rows[tree.index] |= {node: row + at for at, node in enumerate(nodes)}
            row += len(nodes)

    def least_value(self, tree: GrowingTree) -> float:
        """The value below which no node of a tree is drawn."""
        num_nodes = sum(min(len(tree.nodes), tree.max_nodes) for tree in self.trees)
        return self.policy.least_node_value(tree.index, num_nodes)


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
        self._ranks, self._first_ranks = RankAcceptance(width), RankAcceptance(width)
        self._drafted: list[tuple[Request, int, GrowingTree]] = []
        self._root_coverage, self._num_rests = _FIRST_COVERAGE, 0

    def growing(
        self, limits: Sequence[int], copied: Sequence[Sequence[CopiedToken]], policy: Policy
    ) -> NDArray[np.bool_]:
        """``[batch]`` for which requests the model runs, beside known continuations.

        Args:
            limits: ``[batch]`` maximum number of nodes; 0 where the model cannot draft.
            copied: ``[batch]`` the known continuation of each request.
            policy: decides.
        """
        able = [index for index, limit in enumerate(limits) if limit > 0]
        grows = np.zeros(len(limits), dtype=bool)
        if not able:
            return grows
        # Without a continuation, after its end, and where it is wrong, the model adds tokens.
        paths = [np.cumprod([1.0, *(token.acceptance for token in copied[i])]) for i in able]
        values = np.array([1.0 - float(path[:2][-1] - path[-1]) for path in paths])
        entropy = np.zeros(len(able)) if policy.uses_draft_signals() else None
        wanted = policy.grow_trees(TreeLevel(0, able, values, entropy, self._root_coverage))
        if wanted is None or self._num_rests >= _LONGEST_REST:
            wanted = np.ones(len(able), dtype=bool)
        grows[able] = wanted
        self._num_rests = 0 if wanted.any() else self._num_rests + 1
        return grows

    @torch.inference_mode()
    def draft(
        self,
        step: DraftingStep,
        policy: Policy,
        copied: Sequence[Sequence[CopiedToken]] | None = None,
    ) -> DraftedTrees:
        """Draft trees.

        Args:
            step: the step. Its limits are the maximum numbers of verified nodes, and 0 where the
                model does not draft.
            policy: decides which nodes get children.
            copied: ``[batch]`` known continuations that are branches of the trees; ``None`` for
                none.
        """
        model, requests = self._model, step.batch.generating
        self._drafted = []
        branches = copied or [()] * len(step.limits)
        grown = {index: chain_of(branch) for index, branch in enumerate(branches) if branch}
        if not step.active:
            model.read(step.inputs)
            proposals = Proposals.of_trees(all_trees(grown, len(step.limits)))
            return DraftedTrees(proposals, None if grown else ())
        trees = []
        for index in step.active:
            request = requests[index]
            # A failed step takes back the nodes and what was read before them.
            room = max(0, min(model.room(request), MAX_TREE_TOKENS - 1))
            if model.cache.has_rings:
                most = model.cache.max_new_tokens - 1 - model.num_behind(request)
                room = max(0, min(room, most))
            greedy = request.params.temperature == 0
            branch, longest = branches[index], step.limits[index]
            if not greedy:
                # All nodes of a drawn tree are verified. Half of them are kept for drawn ones.
                branch = worth_verifying(branch, policy.least_node_value(index, 0))
                longest = -(-longest // 2)
            branch = branch[:longest]
            trees.append(GrowingTree(index, greedy, step.limits[index], room, branch))
            self._drafted.append((request, len(request.tokens), trees[-1]))
        growth = _Growth(step, policy, policy.uses_draft_signals(), trees)
        logits = model.read_roots(step.inputs)
        passes = [len(trees)]
        reading: list[_Reading] = [(tree, [ROOT]) for tree in trees]
        while True:
            coverage = self._add_children(growth, logits, reading)
            if len(passes) == 1:
                self._root_coverage += _COVERAGE_WEIGHT * (coverage - self._root_coverage)
            reading = self._next_nodes(growth, coverage)
            if not reading:
                break
            logits = model.read_nodes(self._inputs(step, reading))
            passes.append(len(logits))
        orders = [tree.order() for tree in trees]
        grown |= {
            tree.index: tree.proposed(order) for tree, order in zip(trees, orders, strict=True)
        }
        proposed = all_trees(grown, len(step.limits))
        return DraftedTrees(
            Proposals.of_trees(proposed),
            tuple(passes),
            self._tree_probs(growth),
            tuple(tree.copied for tree in proposed) if any(branches) else None,
            self._tree_signals(growth, orders, branches),
        )

    def learn(self, commit: Commit) -> None:
        """Compare the drafted trees with the tokens that the requests gained.

        The gained tokens follow the target's distribution, whatever was verified. So all children
        of the nodes on their path are learnt from, and of drawn ones those that were tested. If a
        companion's scores decided which drawn nodes were tested, they would bias the estimates.
        """
        if not self._drafted or not any(r is self._drafted[0][0] for r in commit.requests):
            return
        likely: list[tuple[Node, bool]] = []
        drawn: list[tuple[Node, bool]] = []
        for request, start, tree in self._drafted:
            nodes = tree.nodes
            tokens, parents = [node.token for node in nodes], [node.parent for node in nodes]
            known, accepted = known_nodes(tokens, parents, request.tokens[start:])
            pairs = [(nodes[at], right) for at, right in zip(known, accepted, strict=True)]
            right_ranks = {node.parent: node.rank for node, right in pairs if right}
            if tree.greedy:
                likely += [pair for pair in pairs if pair[0].rank != COPIED]
            elif not commit.leaves_nodes_out:
                drawn += [
                    (node, right)
                    for node, right in pairs
                    if COPIED < node.rank <= right_ranks.get(node.parent, node.rank)
                ]
        self._drafted = []
        self._acceptance.learn(
            np.array([node.rank == 0 for node, _ in likely]),
            np.array([node.prob for node, _ in likely]),
            np.array([right for _, right in likely]),
        )
        self._ranks.learn(
            np.array([node.rank for node, _ in drawn]),
            np.array([node.prob for node, _ in drawn]),
            np.array([right for _, right in drawn]),
        )

    def forget(self) -> None:
        """A step failed. Nothing is learnt from it."""
        self._drafted = []

    def _add_children(self, growth: _Growth, logits: Tensor, reading: Sequence[_Reading]) -> float:
        """Add the children of the nodes that were read.

        Returns:
            The mean estimated probability that a child of a node is accepted, if the node is
            reached and no copied token is right there.
        """
        step = growth.step
        owners = [tree.index for tree, nodes in reading for _ in nodes]
        temperature = step.batch.controls.temperature[upload(owners, torch.long, logits.device)]
        found = self._children(logits, temperature, growth.signals)
        q = self._distributions(step, logits, reading)
        growth.remember(logits, temperature, q, reading)
        estimates = self._acceptance.predict(found.probs)
        # With policies that do not depend on time, a seed reproduces its text.
        fixed = {tree.index: growth.policy.is_reproducible(tree.index) for tree, _ in reading}
        is_fixed = np.array([fixed[owner] for owner in owners])[:, None]
        first, learnt = (each.predict(q.largest) for each in (self._first_ranks, self._ranks))
        ranks = np.where(is_fixed, first, learnt)
        # A token that has no probability is no child.
        ranks *= np.arange(ranks.shape[1]) < q.support[:, None]
        probs, rows, of_ranks = found.probs.tolist(), estimates.tolist(), ranks.tolist()
        entropy = [0.0] * len(owners) if found.entropy is None else found.entropy.tolist()
        drawing: list[_Drawing] = []
        row, total, covered = 0, 0.0, 0.0
        for tree, nodes in reading:
            tree.was_read(nodes, row)
            counts: list[int] = []
            own: list[list[float]] = []
            if not tree.greedy:
                # Drawn children are tested after a copied one was rejected.
                own = [
                    [tree.open_share(node) * estimate for estimate in ranked]
                    for node, ranked in zip(nodes, of_ranks[row : row + len(nodes)], strict=True)
                ]
                counts = tree.children_to_draw(nodes, own, growth.least_value(tree))
            for at, node in enumerate(nodes):
                if tree.greedy:
                    tree.add(node, found.tokens[row], probs[row], rows[row], entropy[row])
                    copied = tree.copied_child(node)
                    covered += tree.value(node) * sum(
                        estimate
                        for token, estimate in zip(found.tokens[row], rows[row], strict=True)
                        if copied is None or token != copied.token
                    )
                else:
                    values = own[at][: counts[at]]
                    if values:
                        largest = float(q.largest[row])
                        drawing.append(
                            _Drawing(tree, node, q.rows[row], values, largest, entropy[row])
                        )
                    covered += tree.value(node) * sum(values)
                total += tree.open_value(node)
                row += 1
        if drawing:
            assert q.probs is not None
            self._draw(growth, q.probs, drawing)
        return min(1.0, covered / total) if total else 0.0

    def _distributions(
        self, step: DraftingStep, logits: Tensor, reading: Sequence[_Reading]
    ) -> _Distributions:
        """The distributions that children of the nodes that were read are drawn from."""
        nodes = enumerate((tree, node) for tree, own in reading for node in own)
        drawn = [(row, tree, node) for row, (tree, node) in nodes if not tree.greedy]
        largest, support = np.zeros(len(logits)), np.zeros(len(logits), dtype=np.int64)
        if not drawn:
            return _Distributions(None, {}, largest, support)
        own_rows = [row for row, _, _ in drawn]
        rows = upload(own_rows, torch.long, logits.device)
        owners = upload([tree.index for _, tree, _ in drawn], torch.long, logits.device)
        q = row_probabilities(logits[rows], step.batch.controls, owners).nan_to_num(nan=0.0)
        q = self._without_copied(q, [tree.copied_child(node) for _, tree, node in drawn])
        known = fetch(q.amax(dim=1), (q > 0).sum(dim=1))
        largest[own_rows], support[own_rows] = (each.numpy() for each in known)
        return _Distributions(q, {row: at for at, row in enumerate(own_rows)}, largest, support)

    def _draw(self, growth: _Growth, distributions: Tensor, drawing: Sequence[_Drawing]) -> None:
        """Draw children without replacement, and add them to their trees."""
        batch, device = growth.step.batch, distributions.device
        assert batch.uniforms is not None
        q = distributions[upload([each.row for each in drawing], torch.long, device)]
        width = max(len(each.values) for each in drawing)
        uniforms = torch.zeros(len(drawing), width, dtype=torch.float64)
        for at, each in enumerate(drawing):
            tree, count = each.tree, len(each.values)
            numbers = batch.uniforms.draft[tree.index, tree.num_drawn : tree.num_drawn + count]
            uniforms[at, :count] = numbers
            tree.num_drawn += count
        drawn = draw_children(q, uniforms.to(device))
        first_row = sum(map(len, growth.parts))
        growth.parts.append(q)
        tokens = self._model.target_tokens(drawn.clamp(min=0))
        for at, (each, own, there) in enumerate(
            zip(drawing, tokens.tolist(), (drawn >= 0).tolist(), strict=True)
        ):
            count = sum(there[: len(each.values)])
            # A drawn token has a probability, even where rounding left none beside a copied one.
            probs = [max(each.largest, _LEAST_PROB)] * count
            first = len(each.tree.nodes)
            each.tree.add(each.node, own[:count], probs, each.values[:count], each.entropy)
            places = growth.rows.setdefault(each.tree.index, {})
            places |= dict.fromkeys(range(first, len(each.tree.nodes)), first_row + at)

    def _without_copied(self, q: Tensor, copied: Sequence[CopiedToken | None]) -> Tensor:
        """Distributions without tokens that are children already; zeros where nothing is left.

        Args:
            q: ``[rows, own vocab]``.
            copied: ``[rows]`` the token.
        """
        if not any(copied):
            return q
        tokens = upload([-1 if c is None else c.token for c in copied], torch.long, q.device)
        ids = self._model.target_tokens(torch.arange(q.shape[1], device=q.device))
        left = q.masked_fill(ids == tokens.unsqueeze(1), 0.0)
        total = left.sum(dim=1, keepdim=True)
        return left / torch.where(total > 0, total, 1.0)

    def _tree_probs(self, growth: _Growth) -> TreeProbs | None:
        """The distributions of drawn trees."""
        drawn = {index: own for index, own in growth.rows.items() if own}
        if not drawn:
            return None
        rows: list[list[int]] = [[] for _ in growth.step.limits]
        for tree in growth.trees:
            if tree.index in drawn:
                places = drawn[tree.index]
                rows[tree.index] = [places.get(node, -1) for node in range(len(tree.nodes))]
        return self._probs_of(growth.parts, rows)

    def _probs_of(self, parts: Sequence[Tensor], rows: list[list[int]]) -> TreeProbs:
        """Distributions of nodes.

        Args:
            parts: ``[rows, own vocab]`` each.
            rows: ``[batch]`` the row of each node.
        """
        probs, vocab_size = torch.cat(list(parts)), self._model.vocab_size
        own = torch.arange(probs.shape[1], device=probs.device)
        ids = self._model.target_tokens(own)
        is_whole = len(own) == vocab_size and torch.equal(ids, own)
        return TreeProbs(probs, rows, None if is_whole else ids, vocab_size)

    def _tree_signals(
        self,
        growth: _Growth,
        orders: Sequence[Sequence[int]],
        branches: Sequence[Sequence[CopiedToken]],
    ) -> TreeSignals | None:
        """The signals of all nodes, in the order in which they are proposed.

        Args:
            growth: the trees that the model grew.
            orders: the order of the nodes of each of them.
            branches: ``[batch]`` known continuations. Alone, they are trees of requests that the
                model did not draft for.
        """
        if growth.known is None:
            return None
        acceptance = [[token.acceptance for token in branch] for branch in branches]
        rows = [[-1] * len(branch) for branch in branches]
        ranks = [[COPIED] * len(branch) for branch in branches]
        for tree, order in zip(growth.trees, orders, strict=True):
            known, nodes = growth.known_rows[tree.index], [tree.nodes[node] for node in order]
            rows[tree.index] = [-1 if n.rank == COPIED else known[n.parent] for n in nodes]
            above = [max(tree.value(node.parent), 1e-30) for node in nodes]
            acceptance[tree.index] = [
                min(1.0, node.value / value) for node, value in zip(nodes, above, strict=True)
            ]
            ranks[tree.index] = [node.rank for node in nodes]
        probs = self._probs_of(growth.known, rows)
        return TreeSignals(probs, acceptance, ranks, growth.step.limits)

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

    def _next_nodes(self, growth: _Growth, coverage: float) -> list[_Reading]:
        """The nodes that get children next, in order of cache slot."""
        trees = growth.trees
        best = [(tree, tree.best_newest(self._width)) for tree in trees]
        found = [(tree, node) for tree, nodes in best for node in nodes]
        if not found:
            return []
        chosen = [tree.nodes[node] for tree, node in found]
        level = TreeLevel(
            chosen[0].depth,
            [tree.index for tree, _ in found],
            np.array([tree.open_value(node) for tree, node in found]),
            np.array([node.entropy for node in chosen]) if growth.signals else None,
            coverage,
        )
        grows = growth.policy.grow_trees(level)
        if grows is not None:
            kept = iter(grows.tolist())
            best = [(tree, [node for node in nodes if next(kept)]) for tree, nodes in best]
        for tree, nodes in best:
            if not nodes:
                tree.stop()
        return [(tree, nodes) for tree, nodes in best if nodes]

    def _inputs(self, step: DraftingStep, reading: Sequence[_Reading]) -> list[NodeInput]:
        lengths, inputs = self._model.cache.lengths, []
        for tree, nodes in reading:
            slot = step.cache_slots[tree.index]
            inputs.append(tree.read(nodes, slot, lengths[slot]))
        return inputs
