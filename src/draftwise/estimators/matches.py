"""P(accept) of tokens that continue a text like an earlier occurrence of its last tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.estimators.ratios import GroupRatio

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

# These constants, except the initial values, are also declared in matches.h.
# Smallest match length of each group of lengths, and smallest number of votes of each group.
_LENGTHS = np.array([1, 2, 3, 4, 6, 9, 14, 20])
_VOTES = np.array([1, 2, 4])
# Initial acceptance at a share of 1 for each group of lengths, for sampled and for greedy requests.
# Observations replace it.
_START = np.array(
    [
        [0.15, 0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.85],
        [0.25, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92, 0.95],
    ]
)
# Weight of the initial values, and of a length's factor in those of its groups of votes and
# sources, as numbers of verified tokens.
_START_WEIGHT = 8.0
_PARENT_WEIGHT = 12.0
# Factor by which older observations of a group lose weight with each verified token of it.
_MEMORY = 0.998
LOWEST, HIGHEST = 0.01, 0.995


class MatchedNodes(NamedTuple):
    """Nodes of token trees that continue a text like earlier occurrences of its last tokens.

    Attributes:
        shares: ``[nodes]`` share of the votes of each node among its parent's.
        votes: ``[nodes]`` number of votes for each node.
        match_lengths: ``[nodes]`` length of the longest match up to the node's parent.
        from_corpus: ``[nodes]`` whether that match is in the corpus.
    """

    shares: Floats
    votes: Integers
    match_lengths: Integers
    from_corpus: Booleans


class MatchAcceptance:
    """The acceptance of a token is its share of the votes times a factor, learnt online.

    The factor depends on the length of the match at the token, on the number of votes for it, and
    on the source of the match. The length counts the tokens before the draft and the drafted tokens
    before the token. The factor is a ratio of sums, accepted tokens over the shares of verified
    ones, separately for sampled and for greedy requests. The estimates of groups with few
    observations are pulled towards those of all matches of the length.

    The kernels of ``matches.h`` compute the same, in the same memory.
    """

    def __init__(self) -> None:
        """Start from the initial values."""
        self._by_length = GroupRatio(_START * _START_WEIGHT, np.full(_START.shape, _START_WEIGHT))
        shape = 2, len(_LENGTHS), 2, len(_VOTES)
        self._by_group = GroupRatio(np.zeros(shape), np.zeros(shape))

    @property
    def sums(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Accepted tokens and the sum of their shares: by length, and then by group."""
        lengths, groups = self._by_length, self._by_group
        return lengths.accepted, lengths.expected, groups.accepted, groups.expected

    def predict(
        self,
        greedy: Booleans,
        shares: Floats,
        votes: Integers,
        match_lengths: Integers,
        from_corpus: Booleans,
    ) -> Floats:
        """``[batch, width]`` P(accept) of each token, if all tokens before it are accepted.

        Args:
            greedy: ``[batch]`` whether each request is decoded at temperature 0.
            shares: ``[batch, width]`` share of the votes of each token.
            votes: ``[batch, width]`` number of votes for each token.
            match_lengths: ``[batch]`` length of the match before the first token.
            from_corpus: ``[batch]`` whether the match is in the corpus.
        """
        groups = _chain_groups(greedy, votes, match_lengths, from_corpus)
        return self._predicted(groups, shares)

    def predict_nodes(self, greedy: bool, nodes: MatchedNodes) -> Floats:
        """``[nodes]`` P(accept) of nodes of token trees, if their parents are accepted.

        Args:
            greedy: whether the request is decoded at temperature 0.
            nodes: the nodes.
        """
        return self._predicted(_node_groups(greedy, nodes), nodes.shares)

    def _predicted(self, groups: tuple[Integers, ...], shares: Floats) -> Floats:
        return np.clip(self._factors(groups) * shares, LOWEST, HIGHEST)

    def _factors(self, groups: tuple[Integers, ...]) -> Floats:
        """The factor of each group."""
        of_length = self._by_length.mean(groups[:2], 1.0, 0.0)
        return self._by_group.mean(groups, of_length, _PARENT_WEIGHT)

    def learn(
        self,
        greedy: Booleans,
        shares: Floats,
        votes: Integers,
        match_lengths: Integers,
        from_corpus: Booleans,
        num_known: Integers,
        num_accepted: Integers,
    ) -> None:
        """Learn from verified tokens.

        Args:
            greedy, shares, votes, match_lengths, from_corpus: see :meth:`predict`.
            num_known: ``[batch]`` number of tokens up to the first rejected one.
            num_accepted: ``[batch]`` number of accepted tokens.
        """
        rows, places = np.nonzero(np.arange(shares.shape[1]) < num_known[:, None])
        groups = _chain_groups(greedy, votes, match_lengths, from_corpus)
        at = tuple(index[rows, places] for index in groups)
        accepted = (places < num_accepted[rows]).astype(np.float64)
        self._learn(at, accepted, shares[rows, places])

    def learn_nodes(self, greedy: bool, nodes: MatchedNodes, accepted: Booleans) -> None:
        """Learn from nodes whose parents were accepted.

        Args:
            greedy: whether the request is decoded at temperature 0.
            nodes: the nodes.
            accepted: ``[nodes]`` whether each was accepted.
        """
        self._learn(_node_groups(greedy, nodes), accepted.astype(np.float64), nodes.shares)

    def _learn(self, at: tuple[Integers, ...], accepted: Floats, expected: Floats) -> None:
        if not len(accepted):
            return
        self._by_length.add(at[:2], accepted, expected, _MEMORY)
        self._by_group.add(at, accepted, expected, _MEMORY)


def _chain_groups(
    greedy: Booleans, votes: Integers, match_lengths: Integers, from_corpus: Booleans
) -> tuple[Integers, ...]:
    """Temperature, match length, source and votes of each token as indices, ``[batch, width]``."""
    lengths = np.maximum(match_lengths, 1)[:, None] + np.arange(votes.shape[1])
    return _groups(greedy[:, None], votes, lengths, from_corpus[:, None])


def _node_groups(greedy: bool, nodes: MatchedNodes) -> tuple[Integers, ...]:
    """The same of nodes of a token tree, ``[nodes]``."""
    return _groups(np.array([greedy]), nodes.votes, nodes.match_lengths, nodes.from_corpus)


def _groups(
    greedy: Booleans, votes: Integers, lengths: Integers, from_corpus: Booleans
) -> tuple[Integers, ...]:
    shape = votes.shape
    return (
        np.broadcast_to(greedy.astype(np.int64), shape),
        np.searchsorted(_LENGTHS, lengths, side="right") - 1,
        np.broadcast_to(from_corpus.astype(np.int64), shape),
        np.searchsorted(_VOTES, np.maximum(votes, 1), side="right") - 1,
    )
