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
were drawn are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.random import StepUniforms
from draftwise.core.sampling import probabilities
from draftwise.core.trees import ROOT, draw_children
from draftwise.core.types import Draft, TreeProbs
from draftwise.engine.cached_model import CachedModel, NodeInput
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.growing_tree import GrowingTree, Node
from draftwise.engine.proposers.proposals import Proposals, ProposedTree
from draftwise.engine.request import Request
from draftwise.engine.tree_paths import known_nodes
from draftwise.estimators.nodes import NodeAcceptance, RankAcceptance
from draftwise.models.transfer import fetch, upload
from draftwise.models.tree_tokens import MAX_TREE_TOKENS
from draftwise.policies.base import Policy, TreeLevel

Floats = NDArray[np.float64]


class DraftedTrees(NamedTuple):
    """The token trees of a step.

    Attributes:
        proposals: the nodes of each request.
        passes: number of tokens in each pass of the model.
        tree_probs: what drawn trees were drawn from; ``None`` without any.
    """

    proposals: Proposals
    passes: tuple[int, ...] = ()
    tree_probs: TreeProbs | None = None

    def draft(
        self,
        lengths: Sequence[int],
        context: ProposerContext,
        uniforms: StepUniforms | None,
        signals: bool,
    ) -> Draft:
        """The draft of the first nodes of each tree.

        Args:
            lengths: ``[batch]`` number of nodes that are worth verifying. Drawn trees stay whole,
                as what is verified must not depend on their tokens.
            context: the context of the proposer.
            uniforms: random numbers of the step; ``None`` if every request is decoded greedily.
            signals: whether the draft needs signals.
        """
        drawn = [False] * len(lengths)
        if self.tree_probs is not None:
            drawn = [bool(rows) for rows in self.tree_probs.rows]
            every = self.proposals.lengths.tolist()
            lengths = [
                all_ if own else n for all_, own, n in zip(every, drawn, lengths, strict=True)
            ]
        made = self.proposals.draft(lengths, context.vocab_size, context.device, uniforms, signals)
        is_one_hot = tuple(n > 0 and not own for n, own in zip(lengths, drawn, strict=True))
        return replace(made, is_one_hot=is_one_hot, passes=self.passes, tree_probs=self.tree_probs)


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


# A tree, and nodes of it that the model has read or reads next.
_Reading: TypeAlias = tuple[GrowingTree, list[int]]


class _Drawing(NamedTuple):
    """Children of one node that are drawn.

    Attributes:
        tree: the tree.
        node: the node.
        row: row of its logits.
        values: estimated acceptance of each child.
        largest: largest probability of the distribution.
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
        rows: by request, the row of each node of a drawn tree.
    """

    def __init__(
        self, step: DraftingStep, policy: Policy, signals: bool, trees: list[GrowingTree]
    ) -> None:
        self.step, self.policy, self.signals, self.trees = step, policy, signals, trees
        self.parts: list[Tensor] = []
        self.rows: dict[int, list[int]] = {}

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

    @torch.inference_mode()
    def draft(self, step: DraftingStep, policy: Policy) -> DraftedTrees:
        """Draft trees.

        Args:
            step: the step. Its limits are the maximum numbers of verified nodes.
            policy: decides which nodes get children.
        """
        model, requests = self._model, step.batch.generating
        self._drafted = []
        if not step.active:
            model.read(step.inputs)
            return DraftedTrees(Proposals.nothing(len(step.limits)))
        trees = []
        for index in step.active:
            request = requests[index]
            # A failed step takes back the nodes and what was read before them.
            most = model.cache.max_new_tokens - 1 - model.num_behind(request)
            room = max(0, min(model.room(request), MAX_TREE_TOKENS - 1, most))
            greedy = request.params.temperature == 0
            trees.append(GrowingTree(index, greedy, step.limits[index], room))
            self._drafted.append((request, len(request.tokens), trees[-1]))
        growth = _Growth(step, policy, policy.uses_draft_signals(), trees)
        logits = model.read_roots(step.inputs)
        passes = [len(trees)]
        reading: list[_Reading] = [(tree, [ROOT]) for tree in trees]
        while True:
            coverage = self._add_children(growth, logits, reading)
            reading = self._next_nodes(growth, coverage)
            if not reading:
                break
            logits = model.read_nodes(self._inputs(step, reading))
            passes.append(len(logits))
        grown = {tree.index: tree.proposed() for tree in trees}
        proposals = Proposals.of_trees(
            [grown.get(index, ProposedTree()) for index in range(len(step.limits))]
        )
        return DraftedTrees(proposals, tuple(passes), self._tree_probs(growth))

    def learn(self, commit: Commit) -> None:
        """Compare the drafted trees with the tokens that the requests gained.

        The gained tokens follow the target's distribution, whatever was verified. So all children
        of the nodes on their path are learnt from, and of drawn ones those that were tested.
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
            if tree.greedy:
                likely += pairs
            else:
                right_ranks = {node.parent: node.rank for node, right in pairs if right}
                drawn += [
                    (node, right)
                    for node, right in pairs
                    if node.rank <= right_ranks.get(node.parent, node.rank)
                ]
        self._drafted = []
        self._acceptance.learn(
            np.ones(len(likely), dtype=bool),
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
            The mean estimated probability that a child of a node that is reached is accepted.
        """
        step = growth.step
        owners = [tree.index for tree, nodes in reading for _ in nodes]
        temperature = step.batch.controls.temperature[upload(owners, torch.long, logits.device)]
        found = self._children(logits, temperature, growth.signals)
        greedy = np.array([tree.greedy for tree, nodes in reading for _ in nodes])
        estimates = self._acceptance.predict(greedy, found.probs)
        # With policies that do not depend on time, a seed reproduces its text.
        fixed = {tree.index: growth.policy.is_reproducible(tree.index) for tree, _ in reading}
        is_fixed = np.array([fixed[owner] for owner in owners])[:, None]
        largest = found.probs[:, 0]
        ranks = np.where(is_fixed, self._first_ranks.predict(largest), self._ranks.predict(largest))
        # A token that has no probability is no child, whichever law applies.
        ranks[:, : found.probs.shape[1]] *= found.probs > 0
        ranks[:, found.probs.shape[1] :] = 0.0
        probs, rows, of_ranks = found.probs.tolist(), estimates.tolist(), ranks.tolist()
        entropy = [0.0] * len(owners) if found.entropy is None else found.entropy.tolist()
        drawing: list[_Drawing] = []
        row, total, covered = 0, 0.0, 0.0
        for tree, nodes in reading:
            tree.was_read(nodes, row)
            counts: list[int] = []
            if not tree.greedy:
                own = of_ranks[row : row + len(nodes)]
                counts = tree.children_to_draw(nodes, own, growth.least_value(tree))
            for at, node in enumerate(nodes):
                if tree.greedy:
                    tree.add(node, found.tokens[row], probs[row], rows[row], entropy[row])
                    covered += tree.value(node) * sum(rows[row])
                else:
                    values = of_ranks[row][: counts[at]]
                    if values:
                        drawing.append(
                            _Drawing(tree, node, row, values, probs[row][0], entropy[row])
                        )
                    covered += tree.value(node) * sum(values)
                total += tree.value(node)
                row += 1
        if drawing:
            self._draw(growth, logits, drawing)
        return covered / total if total else 0.0

    def _draw(self, growth: _Growth, logits: Tensor, drawing: Sequence[_Drawing]) -> None:
        """Draw children without replacement, and add them to their trees."""
        batch, device = growth.step.batch, logits.device
        assert batch.uniforms is not None
        rows = upload([each.row for each in drawing], torch.long, device)
        owners = upload([each.tree.index for each in drawing], torch.long, device)
        q = probabilities(logits[rows], batch.controls.rows(owners))
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
            probs = [each.largest] * count
            each.tree.add(each.node, own[:count], probs, each.values[:count], each.entropy)
            growth.rows.setdefault(each.tree.index, []).extend([first_row + at] * count)

    def _tree_probs(self, growth: _Growth) -> TreeProbs | None:
        """The distributions of drawn trees."""
        if not growth.rows:
            return None
        rows = [growth.rows.get(index, []) for index in range(len(growth.step.limits))]
        probs, vocab_size = torch.cat(growth.parts), self._model.vocab_size
        own = torch.arange(probs.shape[1], device=probs.device)
        ids = self._model.target_tokens(own)
        is_whole = len(own) == vocab_size and torch.equal(ids, own)
        return TreeProbs(probs, rows, None if is_whole else ids, vocab_size)

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
            np.array([node.value for node in chosen]),
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
