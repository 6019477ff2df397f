"""Token trees of a draft model, one pass per depth.

The best nodes of each depth get children, as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section
4.1). The value of a node is the estimated probability that its path is accepted.

The children of a node are the draft's most likely tokens, proposed with certainty at every
temperature. The text is then lossless whichever nodes are drafted and verified, as long as this is
decided before the target's tokens are drawn (the law of :mod:`draftwise.core.trees`). The most
valuable nodes are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from draftwise.core.random import StepUniforms
from draftwise.core.trees import ROOT
from draftwise.core.types import Draft, TreeDraft
from draftwise.engine.cached_model import CachedModel, NodeInput
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.growing_tree import GrowingTree, Node
from draftwise.engine.proposers.next_tokens import next_tokens
from draftwise.engine.proposers.proposals import Proposals, ProposedTree
from draftwise.engine.request import Request
from draftwise.engine.tree_paths import known_nodes
from draftwise.estimators.nodes import NodeAcceptance
from draftwise.models.tree_tokens import MAX_TREE_TOKENS
from draftwise.policies.base import Policy
from draftwise.policies.inputs import DraftPosition

# A tree, and nodes of it that the model has read or reads next.
Reading: TypeAlias = tuple[GrowingTree, list[int]]


class DraftedTrees(NamedTuple):
    """The token trees of a step.

    Attributes:
        proposals: the nodes of each request.
        passes: number of tokens in each pass of the model.
    """

    proposals: Proposals
    passes: tuple[int, ...] = ()

    def draft(
        self,
        lengths: Sequence[int],
        context: ProposerContext,
        uniforms: StepUniforms | None,
        signals: bool,
    ) -> Draft:
        """The draft of the first nodes of each tree.

        Args:
            lengths: ``[batch]`` number of nodes that are worth verifying.
            context: the context of the proposer.
            uniforms: random numbers of the step; ``None`` if every request is decoded greedily.
            signals: whether the draft needs signals.
        """
        made = self.proposals.draft(lengths, context.vocab_size, context.device, uniforms, signals)
        assert isinstance(made, TreeDraft)
        return replace(made, passes=self.passes)


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
        # By whether a request is decoded at temperature 0.
        self._acceptance = {greedy: NodeAcceptance() for greedy in (False, True)}
        self._drafted: list[tuple[Request, int, GrowingTree]] = []

    @torch.inference_mode()
    def draft(self, step: DraftingStep, policy: Policy) -> DraftedTrees:
        """Draft trees.

        Args:
            step: the step. Its limits are the maximum numbers of verified nodes, and 0 where the
                model does not draft.
            policy: decides which nodes get children.
        """
        model, requests = self._model, step.batch.generating
        self._drafted = []
        if not step.active:
            model.read(step.inputs)
            return DraftedTrees(Proposals.of_trees([ProposedTree()] * len(step.limits)))
        trees = []
        for index in step.active:
            request = requests[index]
            # A failed step takes back the nodes and what was read before them.
            room = max(0, min(model.room(request), MAX_TREE_TOKENS - 1))
            if model.cache.has_rings:
                most = model.cache.max_new_tokens - 1 - model.num_behind(request)
                room = max(0, min(room, most))
            greedy = request.params.temperature == 0
            trees.append(GrowingTree(index, greedy, step.limits[index], room))
            self._drafted.append((request, len(request.tokens), trees[-1]))
        wants_entropy = policy.uses_draft_signals
        logits = model.read_roots(step.inputs)
        passes = [len(trees)]
        reading: list[Reading] = [(tree, [ROOT]) for tree in trees]
        while True:
            self._add_children(step, logits, reading, wants_entropy)
            reading = self._next_nodes(trees, policy, wants_entropy)
            if not reading:
                break
            logits = model.read_nodes(self._inputs(step, reading))
            passes.append(len(logits))
        proposed = [ProposedTree() for _ in step.limits]
        for tree in trees:
            proposed[tree.index] = tree.proposed()
        return DraftedTrees(Proposals.of_trees(proposed), tuple(passes))

    def learn(self, commit: Commit) -> None:
        """Compare the drafted trees with the tokens that the requests gained.

        The gained tokens follow the target's distribution, whatever was verified. So all children
        of the nodes on their path are learnt from.
        """
        if not self._drafted or not any(r is self._drafted[0][0] for r in commit.requests):
            return
        pairs: dict[bool, list[tuple[Node, bool]]] = {False: [], True: []}
        for request, start, tree in self._drafted:
            nodes = tree.nodes
            tokens, parents = [node.token for node in nodes], [node.parent for node in nodes]
            known, accepted = known_nodes(tokens, parents, request.tokens[start:])
            pairs[tree.greedy] += zip((nodes[at] for at in known), accepted, strict=True)
        self._drafted = []
        for greedy, own in pairs.items():
            self._acceptance[greedy].learn(
                np.array([node.rank == 0 for node, _ in own]),
                np.array([node.prob for node, _ in own]),
                np.array([right for _, right in own]),
            )

    def forget(self) -> None:
        """A step failed. Nothing is learnt from it."""
        self._drafted = []

    def _add_children(
        self, step: DraftingStep, logits: Tensor, reading: Sequence[Reading], wants_entropy: bool
    ) -> None:
        """Add the children of the nodes that were read."""
        owners = [tree.index for tree, nodes in reading for _ in nodes]
        found = next_tokens(self._model, step, logits, owners, self._width, wants_entropy)
        greedy = np.array([tree.greedy for tree, nodes in reading for _ in nodes])[:, None]
        estimates = np.where(
            greedy,
            self._acceptance[True].predict(found.probs),
            self._acceptance[False].predict(found.probs),
        ).tolist()
        probs, row = found.probs.tolist(), 0
        for tree, nodes in reading:
            tree.was_read(nodes, row)
            for node in nodes:
                entropy = found.entropy[row]
                tree.add(node, found.tokens[row], probs[row], estimates[row], entropy)
                row += 1

    def _next_nodes(
        self, trees: Sequence[GrowingTree], policy: Policy, wants_entropy: bool
    ) -> list[Reading]:
        """The nodes that get children next, in order of cache slot."""
        best = [(tree, tree.best_newest(self._width)) for tree in trees]
        found = [(tree, tree.nodes[node]) for tree, nodes in best for node in nodes]
        if not found:
            return []
        nodes_found = [node for _, node in found]
        level = DraftPosition(
            nodes_found[0].depth - 1,
            [tree.index for tree, _ in found],
            torch.tensor([node.token for node in nodes_found]),
            None,
            torch.tensor([node.entropy for node in nodes_found]) if wants_entropy else None,
            torch.tensor([node.prob for node in nodes_found]),
        )
        grows = policy.keep_drafting(level)
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
