"""Continuations of texts, found after earlier occurrences of their last tokens.

The search is a few operations on arrays of the whole batch. Its time grows with the length of the
texts, but the constant is small: 32 texts of 8,000 tokens take about a millisecond after a pass of
the target (``benchmarks/suffix_matching.py``). Nothing has to be kept up to date but the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# Matches are compared up to this length, in tokens.
_MAX_MATCH = 32
# Number of the latest occurrences of the last token, and of the last two tokens, that are compared.
_MAX_OCCURRENCES = 256
_MAX_PAIR_OCCURRENCES = 64
# Number of matches whose continuations vote.
_MAX_VOTES = 8
# Matches that are shorter than the longest one by more than this do not vote.
_MAX_SHORTER = 3
# A match that is longer by one token counts this many times as much.
_WEIGHT_OF_A_TOKEN = 2.0
_NO_TOKEN = -1


class Continuations(NamedTuple):
    """Proposed continuations of texts.

    Attributes:
        tokens: ``[texts, length]`` int32, the proposed tokens.
        shares: ``[texts, length]`` float64, the share of the votes that each token has among those
            that agree with all tokens before it.
        match_lengths: ``[texts]`` int64, how many last tokens of the text occur before the place
            that is continued; 0 if the last token is new.
    """

    tokens: Tokens
    shares: Floats
    match_lengths: Integers


class SuffixMatcher:
    """The texts of a batch, and the search for their continuations.

    The continuations of the longest matches vote. A match that is longer by one token has twice the
    weight. The proposed continuation is the one with the largest expected number of agreeing
    tokens, if the text continues like a match that is drawn by weight.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        """Allocate memory for texts.

        Args:
            num_slots: number of texts.
            max_length: maximum length of a text, in tokens.
        """
        self._texts: Tokens = np.full((num_slots, max_length), _NO_TOKEN, dtype=np.int32)
        self._lengths: Integers = np.zeros(num_slots, dtype=np.int64)

    def length(self, slot: int) -> int:
        """Length of a slot's text, in tokens."""
        return int(self._lengths[slot])

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Replace a slot's text."""
        self._texts[slot] = _NO_TOKEN
        self._lengths[slot] = 0
        self.extend(slot, tokens)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens to a slot's text."""
        start = self._lengths[slot]
        self._texts[slot, start : start + len(tokens)] = tokens
        self._lengths[slot] += len(tokens)

    def truncate(self, slot: int, length: int) -> None:
        """Remove the tokens of a slot's text after a length."""
        self._texts[slot, length:] = _NO_TOKEN
        self._lengths[slot] = min(self._lengths[slot], length)

    def continuations(self, slots: Sequence[int], max_tokens: int) -> Continuations:
        """Find continuations of texts.

        A match near the end of the text continues up to the end. After that, its continuation
        repeats, as if the text were periodic.

        Args:
            slots: slots of the texts, none empty.
            max_tokens: number of tokens of each continuation, at least 1.
        """
        rows = np.asarray(slots, dtype=np.int64)
        ends, matches = self._lengths[rows], self._matches(rows)
        if not len(matches.texts):
            shape = len(rows), max_tokens
            nothing = np.zeros(len(rows), dtype=np.int64)
            return Continuations(np.zeros(shape, dtype=np.int32), np.zeros(shape), nothing)
        at, weights = _voters(matches)
        found = weights > 0
        places = np.where(found, matches.places[at], 0)[:, :, None]
        period = np.maximum(ends[:, None] - 1 - places[:, :, 0], 1)[:, :, None]
        offsets = np.arange(max_tokens)[None, None, :] % period
        proposed = self._texts[rows[:, None, None], places + 1 + offsets]
        # agree[t, i, j, d]: continuations i and j of text t have the same first d + 1 tokens.
        same = proposed[:, :, None, :] == proposed[:, None, :, :]
        agree = np.logical_and.accumulate(same, axis=3)
        support = np.einsum("tijd,tj->tid", agree.astype(np.float64), weights)
        best = np.where(found, support.sum(axis=2), -1.0).argmax(axis=1)
        text = np.arange(len(rows))
        chosen = support[text, best]
        before = np.concatenate([weights.sum(axis=1, keepdims=True), chosen[:, :-1]], axis=1)
        lengths = np.where(found[text, best], matches.lengths[at[text, best]], 0)
        shares = np.where(before > 0, chosen / np.maximum(before, 1e-300), 0.0)
        tokens = np.where(lengths[:, None] > 0, proposed[text, best], 0)
        return Continuations(tokens, shares, lengths)

    def _matches(self, slots: Integers) -> _Matches:
        """Earlier occurrences of each text's last tokens, in order of text and place."""
        ends = self._lengths[slots]
        width = int(ends.max(initial=1))
        last = self._texts[slots, ends - 1]
        first = int(slots[0])
        # Slots in a row are a view, which need not be copied.
        are_in_a_row = np.array_equal(slots, np.arange(first, first + len(slots)))
        whole = self._texts[first : first + len(slots)] if are_in_a_row else self._texts[slots]
        hits = np.flatnonzero(whole[:, :width] == last[:, None])
        texts, places = np.divmod(hits, width)
        is_earlier = places < ends[texts] - 1
        texts, places = texts[is_earlier], places[is_earlier]
        latest = _latest(texts, _MAX_OCCURRENCES)
        texts, places = texts[latest], places[latest]
        lengths = np.ones(len(texts), dtype=np.int64)
        alive = np.arange(len(texts))
        for length in range(1, _MAX_MATCH):
            text, place = texts[alive], places[alive] - length
            slot, inside = slots[text], place >= 0
            expected = self._texts[slot, ends[text] - 1 - length]
            alive = alive[inside & (self._texts[slot, np.maximum(place, 0)] == expected)]
            if length == 1:
                alive = alive[_latest(texts[alive], _MAX_PAIR_OCCURRENCES)]
            if not len(alive):
                break
            lengths[alive] = length + 1
        # Of single tokens, which are many, only the latest ones can vote.
        longest = np.zeros(len(slots), dtype=np.int64)
        np.maximum.at(longest, texts, lengths)
        is_long = lengths >= longest[texts] - _MAX_SHORTER
        is_long &= lengths > 1
        latest = _latest(texts, _MAX_VOTES)
        is_long[latest] |= longest[texts[latest]] <= 1 + _MAX_SHORTER
        kept = np.flatnonzero(is_long)
        return _Matches(texts[kept], places[kept], lengths[kept], longest)


class _Matches(NamedTuple):
    """Matches, ``[matches]`` each except the last.

    Attributes:
        texts: index of the text, ascending.
        places: position of the last matching token, ascending within a text.
        lengths: number of matching tokens.
        longest: ``[texts]`` length of the longest match of each text; 0 without a match.
    """

    texts: Integers
    places: Integers
    lengths: Integers
    longest: Integers


def _latest(texts: Integers, count: int) -> Integers:
    """Indices of the last entries of each text, up to a number."""
    if not len(texts):
        return np.zeros(0, dtype=np.int64)
    ends = np.bincount(texts).cumsum()
    return np.flatnonzero(ends[texts] - np.arange(len(texts)) <= count)


def _voters(matches: _Matches) -> tuple[Integers, Floats]:
    """The matches that vote: the longest ones, and the latest among equals.

    Returns:
        Indices of the matches ``[texts, votes]`` int64, and their weights ``[texts, votes]``
        float64, 0 for places without a match.
    """
    order = np.lexsort((-matches.places, -matches.lengths, matches.texts))
    texts = matches.texts[order]
    rank = np.arange(len(order)) - np.searchsorted(texts, texts, side="left")
    kept = rank < _MAX_VOTES
    at = np.zeros((len(matches.longest), _MAX_VOTES), dtype=np.int64)
    weights = np.zeros(at.shape)
    at[texts[kept], rank[kept]] = order[kept]
    shorter = matches.longest[texts[kept]] - matches.lengths[order[kept]]
    weights[texts[kept], rank[kept]] = _WEIGHT_OF_A_TOKEN ** -shorter.astype(np.float64)
    return at, weights
