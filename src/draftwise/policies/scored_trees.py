"""Selection among the nodes of token trees by a companion's scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwise.core.trees import ROOT
from draftwise.core.types import CompanionScores, Draft, Outcome
from draftwise.estimators.node_scores import NodeScores

Floats = NDArray[np.float64]

# One scored step in so many verifies all drawn nodes.
_EXPLORE_EVERY = 16


@dataclass(frozen=True)
class _Tree:
    """The nodes of one request.

    Attributes:
        tokens, parents: ``[nodes]``.
        estimates: ``[nodes]`` the draft's estimates of P(accept).
        ranks: ``[nodes]``; -1 for a copied node.
        overlap, agreement: ``[nodes]`` S and A; NaN for a node without scores.
        drawn: ``[nodes]`` whether each was drawn.
        is_drawn: whether other nodes than copied ones were drawn.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    estimates: Floats
    ranks: NDArray[np.int64]
    overlap: Floats
    agreement: Floats
    drawn: NDArray[np.bool_]
    is_drawn: bool


class ScoredTrees:
    """Verifies the nodes that are worth it by S and A, and learns how often they are right.

    Trees that are proposed with certainty stay lossless whichever nodes are verified. A node is
    verified if the probability that its path is accepted, from S and A of all its nodes, reaches a
    price. Of a drawn node, this decision uses its rank and S, which do not depend on its token, and
    S and A of the nodes before it. So it may use A of its ancestors and not its own. A drawn node
    is not verified without its siblings that were drawn before it.

    Drawn nodes that are never verified would never be learnt from. So in some steps, which are
    chosen before anything is drafted, all of them are verified.

    Attributes:
        explores: whether all nodes of a drawn tree are verified in the current step.
        nodes: ``[batch]`` the verified nodes of each request in the last step.
        gained: expected number of tokens that these nodes gain, minus that of the nodes that would
            be verified without scores.
        num_dropped: number of nodes that would be verified without scores, minus the verified ones.
    """

    def __init__(self) -> None:
        """Start without experience."""
        self._scores = NodeScores()
        self._trees: list[_Tree] = []
        self._num_steps = 0
        self.explores = False
        self.nodes: tuple[tuple[int, ...], ...] = ()
        self.gained, self.num_dropped = 0.0, 0

    def begin_step(self) -> None:
        """Discard the state of a step that was not learnt from."""
        self._trees, self.nodes = [], ()

    def select(
        self, draft: Draft, scores: CompanionScores, planned: Sequence[int], least: float
    ) -> tuple[tuple[int, ...], ...]:
        """Select the nodes to verify.

        Args:
            draft: token trees with signals.
            scores: the companion's scores.
            planned: ``[batch]`` number of leading nodes that would be verified without scores, of
                trees that were not drawn.
            least: probability at which a node is worth verifying. It must not depend on what was
                drawn in this step.
        """
        self._trees = _trees_of(draft, scores)
        self._num_steps += 1
        is_drawn = any(tree.is_drawn for tree in self._trees)
        self.explores = is_drawn and self._num_steps % _EXPLORE_EVERY == 0
        self.gained, self.num_dropped = 0.0, 0
        chosen = []
        for tree, first in zip(self._trees, planned, strict=True):
            nodes, values = self._chosen(tree, 0.0 if self.explores and tree.is_drawn else least)
            count = len(tree.tokens) if tree.is_drawn else first
            self.gained += float(values[nodes].sum() - values[:count].sum())
            self.num_dropped += count - len(nodes)
            chosen.append(tuple(nodes))
        self.nodes = tuple(chosen)
        return self.nodes

    def _chosen(self, tree: _Tree, least: float) -> tuple[list[int], Floats]:
        """The selected nodes, and ``[nodes]`` the probability that each is accepted."""
        own = self._scores.by_token(tree.estimates, tree.overlap, tree.agreement, tree.drawn)
        before = own.copy()
        drawn = tree.drawn
        before[drawn] = self._scores.by_place(
            tree.estimates[drawn], tree.overlap[drawn], tree.ranks[drawn]
        )
        values = np.zeros(len(own))
        chosen: list[int] = []
        is_kept, has_dropped = {ROOT}, set[int]()
        for node, parent in enumerate(tree.parents):
            reach = 1.0 if parent == ROOT else float(values[parent])
            values[node] = reach * own[node]
            if parent not in is_kept or parent in has_dropped:
                continue
            if reach * before[node] >= least:
                chosen.append(node)
                is_kept.add(node)
            elif drawn[node]:
                has_dropped.add(parent)
        return chosen, values

    def learn(self, outcome: Outcome) -> None:
        """Learn from what was accepted in the step of :meth:`select`."""
        trees, self._trees = self._trees, []
        if outcome.paths is None or len(outcome.paths) != len(trees):
            return
        parts: list[tuple[_Tree, list[int], list[bool]]] = []
        for index, (tree, chosen, path) in enumerate(
            zip(trees, self.nodes, outcome.paths, strict=True)
        ):
            if index in outcome.failed:
                continue
            accepted = {chosen[place] for place in path}
            above = {ROOT} | accepted
            last = chosen[path[-1]] if path else ROOT
            verified = set(chosen)
            known, right = list[int](), list[bool]()
            for node, parent in enumerate(tree.parents):
                if parent not in above or np.isnan(tree.overlap[node]):
                    continue
                if tree.is_drawn and node not in verified:
                    continue
                # The target's token at the end of the path may be a node that was not verified.
                is_next = parent == last and tree.tokens[node] == outcome.next_tokens[index]
                known.append(node)
                right.append(node in accepted or (is_next and not tree.is_drawn))
            parts.append((tree, known, right))
        if not any(known for _, known, _ in parts):
            return

        self._scores.learn(
            np.concatenate([tree.estimates[known] for tree, known, _ in parts]),
            np.concatenate([tree.overlap[known] for tree, known, _ in parts]),
            np.concatenate([tree.agreement[known] for tree, known, _ in parts]),
            np.concatenate([tree.ranks[known] for tree, known, _ in parts]),
            np.concatenate([tree.drawn[known] for tree, known, _ in parts]),
            np.array([each for _, _, right in parts for each in right]),
        )


def _trees_of(draft: Draft, scores: CompanionScores) -> list[_Tree]:
    """The trees of a draft with their signals. Nodes that no model drafted have no scores."""
    signals = draft.tree_signals
    assert signals is not None
    assert draft.parents is not None
    rows = zip(
        draft.host_tokens,
        draft.parents.tolist(),
        scores.overlap.cpu().double().numpy(),
        scores.agreement.cpu().double().numpy(),
        draft.lengths,
        strict=True,
    )
    trees = []
    for index, (tokens, parents, overlap, agreement, length) in enumerate(rows):
        ranks = np.array(signals.ranks[index][:length], dtype=np.int64)
        is_drawn = draft.is_drawn_tree(index)
        trees.append(
            _Tree(
                tokens[:length],
                parents[:length],
                np.array(signals.acceptance[index][:length], dtype=np.float64),
                ranks,
                overlap[:length],
                agreement[:length],
                is_drawn & (ranks >= 0),
                is_drawn,
            )
        )
    return trees
