"""The texts of a batch, and the search for their continuations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwise.engine.suffix.corpus import SuffixCorpus
from draftwise.engine.suffix.search import NO_TOKEN, find_continuation
from draftwise.models.native.library import native_library
from draftwise.models.native.suffix import FoundContinuations, continuations


class SuffixMatcher:
    """Finds continuations of the texts in its slots, as :mod:`draftwise.engine.suffix.search` does.

    Attributes:
        corpus: other texts that may be continued; ``None`` without a corpus.
    """

    def __init__(self, num_slots: int, max_length: int, corpus: SuffixCorpus | None = None) -> None:
        """Allocate memory for texts.

        Args:
            num_slots: number of texts.
            max_length: maximum length of a text, in tokens.
            corpus: other texts that may be continued.
        """
        self.corpus = corpus
        self._texts = np.full((num_slots, max_length), NO_TOKEN, dtype=np.int32)
        self._ends = np.zeros(num_slots, dtype=np.int64)
        self._namespaces = np.zeros(num_slots, dtype=np.uint64)

    def length(self, slot: int) -> int:
        """Length of a slot's text, in tokens."""
        return int(self._ends[slot])

    def begin(self, slot: int, tokens: Sequence[int], namespace: int = 0) -> None:
        """Replace a slot's text.

        Args:
            slot: the slot.
            tokens: the new text.
            namespace: its namespace in the corpus.
        """
        self._ends[slot] = 0
        self._namespaces[slot] = namespace
        self.extend(slot, tokens)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens to a slot's text."""
        start = self._ends[slot]
        self._texts[slot, start : start + len(tokens)] = tokens
        self._ends[slot] += len(tokens)

    def truncate(self, slot: int, length: int) -> None:
        """Remove the tokens of a slot's text after a length."""
        self._ends[slot] = min(self._ends[slot], length)

    def continuations(
        self, slots: Sequence[int] | NDArray[np.int64], max_tokens: int
    ) -> FoundContinuations:
        """Find continuations of texts.

        Args:
            slots: slots of the texts, none empty.
            max_tokens: maximum length of each continuation, at least 1.
        """
        rows = np.asarray(slots, dtype=np.int64)
        if self.corpus is None:
            return self._search(rows, max_tokens)
        with self.corpus.lock:
            found = self._search(rows, max_tokens)
            used = found.chunks[found.chunks >= 0]
            if len(used):
                self.corpus.use(used)
        return found

    def _search(self, rows: NDArray[np.int64], max_tokens: int) -> FoundContinuations:
        namespaces = self._namespaces[rows]
        return continuations_of(self._texts, self._ends, rows, namespaces, self.corpus, max_tokens)


def continuations_of(
    texts: NDArray[np.int32],
    ends: NDArray[np.int64],
    slots: NDArray[np.int64],
    namespaces: NDArray[np.uint64],
    corpus: SuffixCorpus | None,
    max_tokens: int,
) -> FoundContinuations:
    """Find continuations of texts that are stored in one array.

    Args:
        texts: ``[slots, length]`` tokens of all slots, contiguous.
        ends: ``[slots]`` number of tokens of each slot's text, at least 1 for those searched.
        slots: ``[batch]`` slots of the texts to continue.
        namespaces: ``[batch]`` their namespaces in the corpus.
        corpus: other texts that may be continued, locked; ``None`` without a corpus.
        max_tokens: maximum length of each continuation, at least 1.
    """
    library = native_library()
    if library is not None:
        structure = None if corpus is None else corpus.structure
        return continuations(library, texts, ends, slots, namespaces, structure, max_tokens)
    found = FoundContinuations.nothing(len(slots), max_tokens)
    arrays = None if corpus is None else corpus.arrays
    for index, slot in enumerate(slots.tolist()):
        text = texts[slot, : ends[slot]]
        one = find_continuation(text, int(namespaces[index]), arrays, max_tokens)
        if one is None:
            continue
        count = len(one.tokens)
        found.tokens[index, :count] = one.tokens
        found.shares[index, :count] = one.shares
        found.votes[index, :count] = one.votes
        found.lengths[index], found.match_lengths[index] = count, one.match_length
        found.chunks[index] = one.chunk
    return found
