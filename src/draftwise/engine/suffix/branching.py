"""Token trees from several matches of a text.

:mod:`draftwise.engine.suffix.search` proposes the continuation with the largest support. Where the
matches continue differently, a tree contains several of their continuations. Its nodes are found
best first: the value of a node is the estimated probability that all tokens up to it are accepted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftwise.core.trees import ROOT
from draftwise.engine.suffix.search import (
    NO_TOKEN,
    CorpusArrays,
    Match,
    Tokens,
    continued,
    voting_matches,
)
from draftwise.estimators.matches import MatchAcceptance, MatchedNodes


@dataclass
class SuffixTree:
    """A tree of proposed tokens, the most valuable nodes first.

    Attributes:
        tokens: ``[nodes]``.
        parents: ``[nodes]`` index of each node's parent; -1 for the root.
        values: ``[nodes]`` estimated probability that all tokens up to a node are accepted. They
            do not increase.
        evidence: ``[nodes]`` share of the votes, votes, match length and whether the match is in
            the corpus, as in :class:`MatchedNodes`.
        chunks: chunks of the corpus that are continued.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    evidence: list[tuple[float, int, int, bool]] = field(default_factory=list)
    chunks: set[int] = field(default_factory=set)

    def nodes(self, indices: Sequence[int]) -> MatchedNodes:
        """What the acceptance of some nodes is estimated from."""
        return _matched([self.evidence[index] for index in indices])


@dataclass(frozen=True)
class _Branch:
    """Matches that agree up to a node, and the node itself.

    Attributes:
        token: the node's token.
        parent: index of its parent.
        members: the matches.
        depth: number of tokens up to the node.
        evidence: as in :class:`SuffixTree`.
    """

    token: int
    parent: int
    members: list[int]
    depth: int
    evidence: tuple[float, int, int, bool]


def find_tree(
    text: Tokens,
    namespace: int,
    corpus: CorpusArrays | None,
    max_nodes: int,
    max_children: int,
    acceptance: MatchAcceptance,
    greedy: bool,
) -> SuffixTree:
    """The most valuable nodes of the tree of all voting matches.

    Args:
        text: ``[length]`` tokens, at least one.
        namespace: namespace of the text.
        corpus: other texts; ``None`` without a corpus.
        max_nodes: maximum number of nodes.
        max_children: maximum number of children of a node.
        acceptance: estimates the acceptance of nodes.
        greedy: whether the text is decoded at temperature 0.
    """
    found = SuffixTree()
    matches, weights = voting_matches(text, namespace, corpus)
    if not matches or not max_nodes:
        return found
    proposed = np.stack([continued(match, max_nodes) for match in matches])
    order = itertools.count()
    waiting: list[tuple[float, int, _Branch]] = []

    def add_children(parent: int, members: list[int], depth: int, value: float) -> None:
        branches = _children(matches, weights, proposed, parent, members, depth)[:max_children]
        if not branches:
            return
        nodes = _matched([branch.evidence for branch in branches])
        estimates = acceptance.predict_nodes(greedy, nodes).tolist()
        for branch, estimate in zip(branches, estimates, strict=True):
            heapq.heappush(waiting, (-value * estimate, next(order), branch))

    add_children(ROOT, list(range(len(matches))), 0, 1.0)
    while waiting and len(found.tokens) < max_nodes:
        value, _, branch = heapq.heappop(waiting)
        index = len(found.tokens)
        found.tokens.append(branch.token)
        found.parents.append(branch.parent)
        found.values.append(-value)
        found.evidence.append(branch.evidence)
        longest = matches[branch.members[0]]
        if longest.chunk >= 0:
            found.chunks.add(longest.chunk)
        if branch.depth < max_nodes:
            add_children(index, branch.members, branch.depth, -value)
    return found


def _children(
    matches: Sequence[Match],
    weights: NDArray[np.float64],
    proposed: NDArray[np.int32],
    parent: int,
    members: list[int],
    depth: int,
) -> list[_Branch]:
    """The children of a node, those with the largest share of the votes first."""
    following: dict[int, list[int]] = {}
    for member in members:
        token = int(proposed[member, depth])
        if token != NO_TOKEN:
            following.setdefault(token, []).append(member)
    total = float(weights[members].sum())
    branches = []
    for token, agreeing in following.items():
        longest = matches[agreeing[0]]
        share = float(weights[agreeing].sum()) / total
        evidence = share, len(agreeing), longest.length + depth, longest.chunk >= 0
        branches.append(_Branch(token, parent, agreeing, depth + 1, evidence))
    branches.sort(key=lambda branch: -branch.evidence[0])
    return branches


def _matched(evidence: Sequence[tuple[float, int, int, bool]]) -> MatchedNodes:
    shares, votes, lengths, from_corpus = zip(*evidence, strict=True)
    return MatchedNodes(
        np.array(shares), np.array(votes), np.array(lengths), np.array(from_corpus, dtype=bool)
    )
