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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.trees import ROOT
from draftwise.engine.cached_model import CachedModel, NodeInput
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.drafted_trees import (
    DraftedTrees,
    all_trees,
    chain_of,
    worth_verifying,
)
from draftwise.engine.proposers.drawn_children import Drawing, add_drawn_children
from draftwise.engine.proposers.growing_tree import COPIED, CopiedToken, GrowingTree, Node
from draftwise.engine.proposers.next_tokens import next_tokens
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.proposers.tree_growth import Growth, Reading
from draftwise.engine.request import Request
from draftwise.engine.tree_paths import known_nodes
from draftwise.estimators.nodes import NodeAcceptance, RankAcceptance
from draftwise.models.tree_tokens import MAX_TREE_TOKENS
from draftwise.policies.base import Policy
from draftwise.policies.inputs import TreeLevel

# Probability that a child of a root is accepted, before any tree was drafted, and the weight of a
# step in its mean.
_FIRST_COVERAGE, _COVERAGE_WEIGHT = 0.7, 0.05
# The model grows a tree after so many steps without one, to be measured.
_LONGEST_REST = 64


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
        # Of _target_ids, once it is known.
        self._ids: tuple[Tensor | None] | None = None

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
        num_nodes = sum(min(len(copied[i]), limits[i]) for i in able)
        level = TreeLevel(0, able, values, entropy, self._root_coverage, num_nodes)
        wanted = policy.grow_trees(level)
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
        growth = Growth(model, step, policy, trees, self._target_ids())
        logits = model.read_roots(step.inputs)
        passes = [len(trees)]
        reading: list[Reading] = [(tree, [ROOT]) for tree in trees]
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
            growth.tree_probs(),
            tuple(tree.copied for tree in proposed) if any(branches) else None,
            growth.tree_signals(orders, branches),
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

    def _target_ids(self) -> Tensor | None:
        """``[own vocab]`` ids of the target; ``None`` if they are 0, 1, 2, …"""
        if self._ids is None:
            own = torch.arange(self._model.own_vocab_size, device=self._model.device)
            ids = self._model.target_tokens(own)
            is_whole = len(own) == self._model.vocab_size and torch.equal(ids, own)
            self._ids = (None if is_whole else ids,)
        return self._ids[0]

    def _add_children(self, growth: Growth, logits: Tensor, reading: Sequence[Reading]) -> float:
        """Add the children of the nodes that were read.

        Returns:
            The mean estimated probability that a child of a node is accepted, if the node is
            reached and no copied token is right there.
        """
        step = growth.step
        owners = [tree.index for tree, nodes in reading for _ in nodes]
        found = next_tokens(self._model, step, logits, reading, self._width, growth.wants_entropy)
        growth.keep_read(logits, found.open_probs, found.open_rows, reading)
        estimates = self._acceptance.predict(found.probs)
        # With policies that do not depend on time, a seed reproduces its text.
        fixed = {tree.index: growth.policy.is_reproducible(tree.index) for tree, _ in reading}
        is_fixed = np.array([fixed[owner] for owner in owners])[:, None]
        first, learnt = (each.predict(found.largest) for each in (self._first_ranks, self._ranks))
        ranks = np.where(is_fixed, first, learnt)
        # A token that has no probability is no child.
        ranks *= np.arange(ranks.shape[1]) < found.support[:, None]
        probs, rows, of_ranks = found.probs.tolist(), estimates.tolist(), ranks.tolist()
        entropy, open_rows = found.entropy, found.open_rows
        drawing: list[Drawing] = []
        row, total, covered = 0, 0.0, 0.0
        num_nodes = growth.num_nodes
        for tree, nodes in reading:
            tree.was_read(nodes, row)
            counts: list[int] = []
            own: list[list[float]] = []
            least = growth.least_value(tree, num_nodes)
            if not tree.greedy:
                # Drawn children are tested after a copied one was rejected.
                own = [
                    [tree.open_share(node) * estimate for estimate in ranked]
                    for node, ranked in zip(nodes, of_ranks[row : row + len(nodes)], strict=True)
                ]
                counts = tree.children_to_draw(nodes, own, least)
            for at, node in enumerate(nodes):
                if tree.greedy:
                    tree.add(node, found.tokens[row], probs[row], rows[row], entropy[row])
                    copied, value = tree.copied_child(node), tree.value(node)
                    covered += value * sum(
                        estimate
                        for token, estimate in zip(found.tokens[row], rows[row], strict=True)
                        if value * estimate >= least and (copied is None or token != copied.token)
                    )
                else:
                    values = own[at][: counts[at]]
                    if values:
                        largest = float(found.largest[row])
                        drawing.append(
                            Drawing(tree, node, open_rows[row], values, largest, entropy[row])
                        )
                    covered += tree.value(node) * sum(values)
                total += tree.open_value(node)
                row += 1
        if drawing:
            add_drawn_children(growth, found.open_probs, drawing)
        return min(1.0, covered / total) if total else 0.0

    def _next_nodes(self, growth: Growth, coverage: float) -> list[Reading]:
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
            np.array([node.entropy for node in chosen]) if growth.wants_entropy else None,
            coverage,
            growth.num_nodes,
        )
        grows = growth.policy.grow_trees(level)
        if grows is not None:
            kept = iter(grows.tolist())
            best = [(tree, [node for node in nodes if next(kept)]) for tree, nodes in best]
        for tree, nodes in best:
            if not nodes:
                tree.stop()
        return [(tree, nodes) for tree, nodes in best if nodes]

    def _inputs(self, step: DraftingStep, reading: Sequence[Reading]) -> list[NodeInput]:
        lengths, inputs = self._model.cache.lengths, []
        for tree, nodes in reading:
            slot = step.cache_slots[tree.index]
            inputs.append(tree.read(nodes, slot, lengths[slot]))
        return inputs
