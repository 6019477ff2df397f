"""The texts of a batch, and the search for their continuations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwise.engine.suffix.continuing import TextContinuations
from draftwise.engine.suffix.corpus import SuffixCorpus
from draftwise.engine.suffix.search import NO_TOKEN
from draftwise.kernels.native.suffix import FoundContinuations


class SuffixMatcher:
    """Finds continuations of the texts in its slots, and learns which of them are accepted.

    Attributes:
        continuing: the texts, the search and the estimates of acceptance.
    """

    def __init__(self, num_slots: int, max_length: int, corpus: SuffixCorpus | None = None) -> None:
        """Allocate memory for texts.

        Args:
            num_slots: number of texts.
            max_length: maximum length of a text, in tokens.
            corpus: other texts that may be continued.
        """
        tokens = np.full((num_slots, max_length), NO_TOKEN, dtype=np.int32)
        self.continuing = TextContinuations(tokens, corpus)
        self._texts = self.continuing.texts

    def length(self, slot: int) -> int:
        """Length of a slot's text, in tokens."""
        return int(self._texts.ends[slot])

    def begin(
        self, slot: int, tokens: Sequence[int], namespace: int = 0, greedy: bool = False
    ) -> None:
        """Replace a slot's text.

        Args:
            slot: the slot.
            tokens: the new text.
            namespace: its namespace in the corpus.
            greedy: whether it is decoded at temperature 0.
        """
        self._texts.ends[slot] = 0
        self._texts.namespaces[slot] = namespace
        self._texts.greedy[slot] = greedy
        self.extend(slot, tokens)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens to a slot's text."""
        start = self._texts.ends[slot]
        self._texts.tokens[slot, start : start + len(tokens)] = tokens
        self._texts.ends[slot] += len(tokens)

    def truncate(self, slot: int, length: int) -> None:
        """Remove the tokens of a slot's text after a length."""
        self._texts.ends[slot] = min(self._texts.ends[slot], length)

    def continuations(self, slots: Sequence[int], limits: Sequence[int]) -> FoundContinuations:
        """Find continuations of texts; see :meth:`TextContinuations.find`."""
        return self.continuing.find(slots, limits)

    def learn(
        self, found: FoundContinuations, num_known: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Learn the acceptance of found tokens; see :meth:`TextContinuations.learn`."""
        self.continuing.learn(found, num_known, num_accepted)
