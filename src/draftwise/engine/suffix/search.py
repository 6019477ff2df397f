"""The search for continuations of a text, in NumPy.

The places where the last tokens of a text occur earlier are its *matches*, in the text itself and
in a corpus. The longest matches vote for the next tokens. A match that is longer by one token has
twice the weight. The continuation with the largest expected number of agreeing tokens is proposed.

The kernels of ``suffix.h`` compute the same, about a hundred times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# These constants are also declared in suffix.h.
MAX_MATCH = 32  # matches are compared up to this length
MAX_OCCURRENCES = 256  # latest occurrences of the last token that are compared
MAX_VOTES = 8  # matches whose continuations vote
MAX_SHORTER = 3  # matches that are shorter than the longest by more do not vote
CORPUS_CHUNK = 512  # tokens of a chunk of a corpus
WAYS = 8  # positions in a bucket of an index
SHORT_GRAM, LONG_GRAM = 3, 8  # numbers of tokens that the two indices hash
NO_TOKEN = -1

_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class CorpusArrays:
    """The memory of a corpus.

    A bucket of an index contains positions in ``tokens``, the newest first, at which an n-gram
    ends. Positions may have been overwritten since.

    Attributes:
        tokens: ``[chunks, CORPUS_CHUNK]`` int32.
        lengths: ``[chunks]`` int64, number of tokens in each chunk.
        namespaces: ``[chunks]`` uint64. Only texts of the same namespace may be continued by a
            chunk. All texts may be continued by chunks of namespace 0.
        short_index, long_index: ``[buckets, WAYS]`` int32, -1 for no position. The number of
            buckets is a power of two.
    """

    tokens: Tokens
    lengths: Integers
    namespaces: NDArray[np.uint64]
    short_index: Tokens
    long_index: Tokens


class Match(NamedTuple):
    """A place whose tokens equal the last ones of a text.

    Attributes:
        following: the tokens that follow it, at least one.
        chunk: chunk of the corpus; -1 for the text itself.
        length: number of matching tokens.
    """

    following: Tokens
    chunk: int
    length: int


class Continuation(NamedTuple):
    """A proposed continuation of a text.

    Attributes:
        tokens: ``[length]`` int32, the proposed tokens.
        shares: ``[length]`` float64, the share of the votes that each token has among those that
            agree with all tokens before it.
        votes: ``[length]`` int64, number of these votes for the token.
        match_length: number of last tokens of the text that the match has in common with it.
        chunk: chunk of the corpus that is continued; -1 for the text itself.
    """

    tokens: Tokens
    shares: Floats
    votes: Integers
    match_length: int
    chunk: int


def find_continuation(
    text: Tokens, namespace: int, corpus: CorpusArrays | None, max_tokens: int
) -> Continuation | None:
    """Find the continuation of a text; ``None`` if its last token is new.

    A match in the text itself continues up to the text's end. After that, the continuation repeats,
    as if the text were periodic. A match in the corpus continues up to the end of its chunk.

    Args:
        text: ``[length]`` tokens, at least one.
        namespace: namespace of the text.
        corpus: other texts; ``None`` without a corpus.
        max_tokens: maximum length of the continuation, at least 1.
    """
    matches, weights = voting_matches(text, namespace, corpus)
    if not matches:
        return None
    proposed = np.stack([continued(match, max_tokens) for match in matches])
    # agree[i, j, d]: continuations i and j have the same first d + 1 tokens.
    same = (proposed[:, None] == proposed[None]) & (proposed != NO_TOKEN)[:, None]
    agree = np.logical_and.accumulate(same, axis=2)
    support = np.einsum("ijd,j->id", agree.astype(np.float64), weights)
    best = int(support.sum(axis=1).argmax())
    length = int((proposed[best] != NO_TOKEN).sum())
    chosen = support[best, :length]
    shares = chosen / np.concatenate([[weights.sum()], chosen[:-1]])
    votes = agree[best].sum(axis=0)[:length]
    tokens = proposed[best, :length]
    return Continuation(tokens, shares, votes, matches[best].length, matches[best].chunk)


def voting_matches(
    text: Tokens, namespace: int, corpus: CorpusArrays | None
) -> tuple[list[Match], Floats]:
    """The matches whose continuations vote, the longest first, and ``[matches]`` their weights.

    Args:
        text: ``[length]`` tokens, at least one.
        namespace: namespace of the text.
        corpus: other texts; ``None`` without a corpus.
    """
    matches = _own_matches(text)
    if corpus is not None:
        for space in dict.fromkeys((namespace, 0)):
            matches += _corpus_matches(corpus, space, text)
    # Python sorts stably, so the first of equally long matches stay first.
    matches = sorted(matches, key=lambda match: -match.length)[:MAX_VOTES]
    matches = [match for match in matches if match.length >= matches[0].length - MAX_SHORTER]
    return matches, np.array([2.0 ** (match.length - matches[0].length) for match in matches])


def bucket_of(namespace: int, gram: Tokens, num_buckets: int) -> int:
    """The bucket of an n-gram.

    Args:
        namespace: namespace of its text.
        gram: ``[size]`` tokens.
        num_buckets: number of buckets, a power of two.
    """
    value = namespace
    for token in gram[::-1].tolist():
        value = ((value ^ token) * _MULTIPLIER) & _WORD
        value ^= value >> 32
    return value & (num_buckets - 1)


def index_chunk(corpus: CorpusArrays, chunk: int, first: int, end: int) -> None:
    """Add the positions ``first`` … ``end - 1`` of a chunk to the indices of a corpus."""
    tokens, namespace = corpus.tokens[chunk], int(corpus.namespaces[chunk])
    for place in range(first, end):
        for index, size in ((corpus.short_index, SHORT_GRAM), (corpus.long_index, LONG_GRAM)):
            if place + 1 >= size:
                gram = tokens[place + 1 - size : place + 1]
                bucket = index[bucket_of(namespace, gram, len(index))]
                bucket[1:] = bucket[:-1].copy()
                bucket[0] = chunk * CORPUS_CHUNK + place


def _own_matches(text: Tokens) -> list[Match]:
    """Earlier occurrences of a text's last token, the latest first."""
    places = np.flatnonzero(text[:-1] == text[-1])[: -MAX_OCCURRENCES - 1 : -1]
    lengths = _match_lengths(text, places, text)
    return [
        Match(text[place + 1 :], -1, length)
        for place, length in zip(places.tolist(), lengths.tolist(), strict=True)
    ]


def _corpus_matches(corpus: CorpusArrays, namespace: int, text: Tokens) -> list[Match]:
    """Matches of the longer n-gram, and of the shorter one if there are none."""
    for index, size in ((corpus.long_index, LONG_GRAM), (corpus.short_index, SHORT_GRAM)):
        if len(text) < size:
            continue
        matches = []
        for position in index[bucket_of(namespace, text[-size:], len(index))].tolist():
            chunk, place = divmod(position, CORPUS_CHUNK)
            if position < 0 or int(corpus.namespaces[chunk]) != namespace:
                continue
            stored = corpus.tokens[chunk, : corpus.lengths[chunk]]
            if place + 1 >= len(stored):
                continue
            length = int(_match_lengths(stored, np.array([place]), text)[0])
            if length >= size:
                matches.append(Match(stored[place + 1 :], chunk, length))
        if matches:
            return matches
    return []


def _match_lengths(stored: Tokens, places: Integers, text: Tokens) -> Integers:
    """``[places]`` number of tokens up to each place that equal the last tokens of a text."""
    offsets = np.arange(min(MAX_MATCH, len(text)))
    at = places[:, None] - offsets
    same = (stored[np.maximum(at, 0)] == text[len(text) - 1 - offsets]) & (at >= 0)
    lengths: Integers = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    return lengths


def continued(match: Match, max_tokens: int) -> Tokens:
    """``[max_tokens]`` the tokens after a match; ``NO_TOKEN`` after the end of a chunk."""
    offsets = np.arange(max_tokens)
    if match.chunk < 0:
        return match.following[offsets % len(match.following)]
    padded = np.full(max_tokens, NO_TOKEN, dtype=np.int32)
    count = min(max_tokens, len(match.following))
    padded[:count] = match.following[:count]
    return padded
