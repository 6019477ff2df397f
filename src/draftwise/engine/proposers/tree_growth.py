"""The token trees of a step while a draft model grows them, and their distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from draftwise.core.types import TreeProbs, TreeSignals
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.proposers.growing_tree import COPIED, CopiedToken, GrowingTree
from draftwise.models.transfer import upload
from draftwise.policies.base import Policy

# A tree, and nodes of it that the model has read or reads next.
Reading: TypeAlias = tuple[GrowingTree, list[int]]

# Smallest value of a parent by which the value of its child is divided.
_LEAST_VALUE = 1e-30


class Growth:
    """The trees of a step while they grow.

    Attributes:
        model: the draft model.
        step: the step.
        policy: decides which nodes get children.
        wants_entropy: whether the policy uses the entropy of the draft.
        trees: all trees.
        ids: ``[own vocab]`` int64 ids of the target; ``None`` if they are 0, 1, 2, …
    """

    def __init__(
        self,
        model: CachedModel,
        step: DraftingStep,
        policy: Policy,
        trees: list[GrowingTree],
        ids: Tensor | None,
    ) -> None:
        """Start with the roots.

        Args:
            model, step, policy, trees, ids: see above.
        """
        self.ids = ids
        self.model, self.step, self.policy, self.trees = model, step, policy, trees
        self.wants_entropy = policy.uses_draft_signals()
        # Distributions that children were drawn from, and by request the row of each drawn node.
        self._drawn: list[Tensor] = []
        self._drawn_rows: dict[int, dict[int, int]] = {}
        # Distributions at all nodes that were read, for a companion, and the row of each.
        self._known: list[Tensor] | None = [] if policy.wants_companion() else None
        self._known_rows: dict[int, dict[int, int]] = {tree.index: {} for tree in trees}

    @property
    def num_nodes(self) -> int:
        """Number of nodes so far that may be verified."""
        return sum(min(len(tree.nodes), tree.max_nodes) for tree in self.trees)

    def least_value(self, tree: GrowingTree, num_nodes: int) -> float:
        """The value below which a node of a tree is not worth verifying.

        Args:
            tree: the tree.
            num_nodes: :attr:`num_nodes` at the beginning of the level.
        """
        return self.policy.least_node_value(tree.index, num_nodes)

    def keep_read(
        self,
        logits: Tensor,
        open_probs: Tensor,
        open_rows: Sequence[int],
        reading: Sequence[Reading],
    ) -> None:
        """Keep the distributions at nodes that were read, if a companion scores the trees.

        Args:
            logits: ``[rows, own vocab]``. Greedy requests have their softmax at temperature 1.
            open_probs: ``[drawn, own vocab]`` distributions that children are drawn from.
            open_rows: ``[rows]`` the row of each node there; -1 for greedy requests.
            reading: the nodes, in the order of the rows.
        """
        if self._known is None:
            return
        owners = [tree.index for tree, nodes in reading for _ in nodes]
        temperature = self.step.batch.controls.temperature[
            upload(owners, torch.long, logits.device)
        ]
        scale = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
        probs = (logits.float() / scale).softmax(dim=1).nan_to_num(nan=0.0)
        drawn = [row for row, place in enumerate(open_rows) if place >= 0]
        if drawn:
            probs[upload(drawn, torch.long, probs.device)] = open_probs
        row = sum(map(len, self._known))
        self._known.append(probs)
        for tree, nodes in reading:
            self._known_rows[tree.index] |= {node: row + at for at, node in enumerate(nodes)}
            row += len(nodes)

    def keep_drawn(self, probs: Tensor, nodes: Sequence[tuple[GrowingTree, range, int]]) -> None:
        """Keep the distributions that children were drawn from.

        Args:
            probs: ``[rows, own vocab]``.
            nodes: ``[parents]`` the tree, the drawn children, and the row of each.
        """
        first_row = sum(map(len, self._drawn))
        self._drawn.append(probs)
        for tree, children, row in nodes:
            rows = dict.fromkeys(children, first_row + row)
            self._drawn_rows.setdefault(tree.index, {}).update(rows)

    def tree_probs(self) -> TreeProbs | None:
        """The distributions of drawn trees; ``None`` without any."""
        drawn = {index: own for index, own in self._drawn_rows.items() if own}
        if not drawn:
            return None
        rows: list[list[int]] = [[] for _ in self.step.limits]
        for tree in self.trees:
            if tree.index in drawn:
                places = drawn[tree.index]
                rows[tree.index] = [places.get(node, -1) for node in range(len(tree.nodes))]
        return self._probs_of(self._drawn, rows)

    def tree_signals(
        self, orders: Sequence[Sequence[int]], branches: Sequence[Sequence[CopiedToken]]
    ) -> TreeSignals | None:
        """The signals of all nodes, in the order in which they are proposed.

        Args:
            orders: the order of the nodes of each tree.
            branches: ``[batch]`` known continuations. Alone, they are trees of requests that the
                model did not draft for.

        Returns:
            ``None`` if no companion scores the trees.
        """
        if self._known is None:
            return None
        acceptance = [[token.acceptance for token in branch] for branch in branches]
        rows = [[-1] * len(branch) for branch in branches]
        ranks = [[COPIED] * len(branch) for branch in branches]
        for tree, order in zip(self.trees, orders, strict=True):
            known, nodes = self._known_rows[tree.index], [tree.nodes[node] for node in order]
            rows[tree.index] = [-1 if n.rank == COPIED else known[n.parent] for n in nodes]
            above = [max(tree.value(node.parent), _LEAST_VALUE) for node in nodes]
            acceptance[tree.index] = [
                min(1.0, node.value / value) for node, value in zip(nodes, above, strict=True)
            ]
            ranks[tree.index] = [node.rank for node in nodes]
        return TreeSignals(self._probs_of(self._known, rows), acceptance, ranks, self.step.limits)

    def _probs_of(self, parts: Sequence[Tensor], rows: list[list[int]]) -> TreeProbs:
        """Distributions of nodes.

        Args:
            parts: ``[rows, own vocab]`` each.
            rows: ``[batch]`` the row of each node.
        """
        return TreeProbs(parts, rows, self.ids, self.model.vocab_size)
