"""Continuations of texts with their estimated acceptance, which is learnt from what followed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwise.engine.suffix.branching import SuffixTree, find_tree
from draftwise.engine.suffix.corpus import SuffixCorpus
from draftwise.engine.suffix.search import find_continuation
from draftwise.engine.tree_paths import known_nodes
from draftwise.estimators.matches import MatchAcceptance
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.suffix import (
    FoundContinuations,
    StoredTexts,
    continuations,
    learn_matches,
    match_sums,
)


class TextContinuations:
    """Finds continuations of texts, and estimates the acceptance of their tokens.

    :mod:`draftwise.engine.suffix.search` defines the search, and
    :class:`draftwise.estimators.matches.MatchAcceptance` the estimates. Kernels compute the same.

    Attributes:
        texts: the texts that are continued.
        corpus: other texts that may be continued; ``None`` without a corpus.
        acceptance: the estimates.
    """

    def __init__(self, tokens: NDArray[np.int32], corpus: SuffixCorpus | None = None) -> None:
        """Start with empty texts, and without observations.

        Args:
            tokens: ``[slots, length]`` memory of the texts, contiguous.
            corpus: other texts that may be continued.
        """
        self.texts = StoredTexts(tokens)
        self.corpus = corpus
        self.acceptance = MatchAcceptance()
        self._library = native_library()
        self._sums = match_sums(*self.acceptance.sums)

    def find(self, slots: Sequence[int], limits: Sequence[int]) -> FoundContinuations:
        """Find continuations of texts.

        Args:
            slots: ``[batch]`` slots of the texts to continue, none empty.
            limits: ``[batch]`` maximum length of each continuation; 0 for texts to leave out.
        """
        if self.corpus is None:
            return self._search(slots, limits)
        with self.corpus.lock:
            found = self._search(slots, limits)
            used = found.chunks[found.chunks >= 0]
            if len(used):
                self.corpus.use(used)
        return found

    def find_trees(
        self, slots: Sequence[int], limits: Sequence[int], max_children: int
    ) -> list[SuffixTree]:
        """Find a tree of continuations of each text.

        Args:
            slots: ``[batch]`` slots of the texts to continue, none empty.
            limits: ``[batch]`` maximum number of nodes of each tree; 0 for texts to leave out.
            max_children: maximum number of children of a node.
        """
        texts, corpus = self.texts, self.corpus

        def search(slot: int, limit: int) -> SuffixTree:
            text, namespace = texts.tokens[slot, : texts.ends[slot]], int(texts.namespaces[slot])
            arrays, greedy = None if corpus is None else corpus.arrays, bool(texts.greedy[slot])
            return find_tree(text, namespace, arrays, limit, max_children, self.acceptance, greedy)

        if corpus is None:
            return [search(*each) for each in zip(slots, limits, strict=True)]
        with corpus.lock:
            trees = [search(*each) for each in zip(slots, limits, strict=True)]
            used = sorted({chunk for tree in trees for chunk in tree.chunks})
            if used:
                corpus.use(used)
        return trees

    def learn_tree(self, slot: int, tree: SuffixTree, gained: Sequence[int]) -> None:
        """Learn the acceptance of a tree's nodes.

        Args:
            slot: slot of the text.
            tree: a tree of :meth:`find_trees`.
            gained: the tokens that the text gained.
        """
        known, accepted = known_nodes(tree.tokens, tree.parents, gained)
        if known:
            greedy = bool(self.texts.greedy[slot])
            self.acceptance.learn_nodes(greedy, tree.nodes(known), np.array(accepted))

    def _search(self, slots: Sequence[int], limits: Sequence[int]) -> FoundContinuations:
        corpus, texts = self.corpus, self.texts
        if self._library is not None:
            structure = None if corpus is None else corpus.structure
            return continuations(self._library, texts, slots, limits, structure, self._sums)
        found = FoundContinuations.nothing(slots, limits)
        arrays = None if corpus is None else corpus.arrays
        for row, (slot, limit) in enumerate(zip(slots, limits, strict=True)):
            if not limit:
                continue
            text, namespace = texts.tokens[slot, : texts.ends[slot]], int(texts.namespaces[slot])
            one = find_continuation(text, namespace, arrays, found.tokens.shape[1])
            if one is None:
                continue
            count = min(len(one.tokens), limit)
            found.tokens[row, :count] = one.tokens[:count]
            found.shares[row, :count] = one.shares[:count]
            found.votes[row, :count] = one.votes[:count]
            found.lengths[row], found.match_lengths[row] = count, one.match_length
            found.chunks[row] = one.chunk
        is_proposed = np.arange(found.tokens.shape[1]) < found.lengths[:, None]
        found.acceptance[:] = self.acceptance.predict(*self._evidence(found)) * is_proposed
        return found

    def _evidence(self, found: FoundContinuations) -> tuple[NDArray[Any], ...]:
        """What :class:`MatchAcceptance` uses."""
        greedy, from_corpus = self.texts.greedy[list(found.slots)], found.chunks >= 0
        return greedy, found.shares, found.votes, found.match_lengths, from_corpus

    def learn(
        self, found: FoundContinuations, num_known: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Learn the acceptance of found tokens.

        Args:
            found: continuations of :meth:`find`.
            num_known: ``[batch]`` number of tokens up to the first rejected one.
            num_accepted: ``[batch]`` number of accepted tokens.
        """
        if self._library is not None:
            learn_matches(self._library, found, num_known, num_accepted)
            return
        counts = np.array([num_known, num_accepted], dtype=np.int64)
        self.acceptance.learn(*self._evidence(found), *counts)
