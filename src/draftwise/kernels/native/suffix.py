"""The search for continuations of texts and their acceptance, by the kernels of ``suffix.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.structures import ContinuationCall, MatchSums, SuffixCorpus

_INTEGER = 8  # bytes

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class StoredTexts:
    """Texts in the slots of one array.

    Attributes:
        tokens: ``[slots, length]`` int32, contiguous.
        ends: ``[slots]`` number of tokens of each text.
        namespaces: ``[slots]`` uint64, namespace of each text in a corpus.
        greedy: ``[slots]`` whether each text is decoded at temperature 0.
        addresses: addresses of these arrays, in this order.
    """

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        """Start with empty texts.

        Args:
            tokens: ``[slots, length]`` memory of the tokens.
        """
        num_slots = len(tokens)
        self.tokens = tokens
        self.ends = np.zeros(num_slots, dtype=np.int64)
        self.namespaces = np.zeros(num_slots, dtype=np.uint64)
        self.greedy = np.zeros(num_slots, dtype=bool)
        arrays = self.tokens, self.ends, self.namespaces, self.greedy
        self.addresses = tuple(each.ctypes.data for each in arrays)


class FoundContinuations(NamedTuple):
    """Continuations of several texts. Entries beyond a continuation's length are 0.

    Attributes:
        tokens: ``[texts, width]`` the proposed tokens.
        votes: ``[texts, width]`` number of votes for each token.
        shares: ``[texts, width]`` the share of the votes of each token.
        acceptance: ``[texts, width]`` estimated acceptance probability of each token, if all tokens
            before it are accepted.
        lengths: ``[texts]`` number of proposed tokens.
        match_lengths: ``[texts]`` number of matching tokens before the continuation.
        chunks: ``[texts]`` the continued chunk of the corpus; -1 for the text itself.
        slots: ``[texts]`` slots of the texts.
        call: arguments of the kernels, with the addresses of the arrays.
    """

    tokens: Integers
    votes: Integers
    shares: Floats
    acceptance: Floats
    lengths: Integers
    match_lengths: Integers
    chunks: Integers
    slots: Sequence[int]
    call: ContinuationCall

    @classmethod
    def nothing(cls, slots: Sequence[int], limits: Sequence[int]) -> FoundContinuations:
        """No continuation for any text, in new memory.

        Args:
            slots: ``[texts]`` slots of the texts.
            limits: ``[texts]`` maximum length of each continuation.
        """
        count, width = len(slots), max(limits, default=0)
        wide, narrow = count * width, _INTEGER * count
        # One allocation with a known address takes less time than several arrays.
        memory = (ctypes.c_int64 * (4 * wide + 3 * count))()
        numbers = np.frombuffer(memoryview(memory), dtype=np.int64)
        tokens, votes, shares, acceptance = numbers[: 4 * wide].reshape(4, count, width)
        lengths, match_lengths, chunks = numbers[4 * wide :].reshape(3, count)
        chunks.fill(-1)
        of_tokens = ctypes.addressof(memory)
        of_lengths = of_tokens + 4 * _INTEGER * wide
        call = ContinuationCall(
            tokens=of_tokens,
            votes=of_tokens + _INTEGER * wide,
            shares=of_tokens + 2 * _INTEGER * wide,
            acceptance=of_tokens + 3 * _INTEGER * wide,
            lengths=of_lengths,
            match_lengths=of_lengths + narrow,
            chunks=of_lengths + 2 * narrow,
            num_requests=count,
            width=width,
        )
        floats = shares.view(np.float64), acceptance.view(np.float64)
        return cls(tokens, votes, *floats, lengths, match_lengths, chunks, slots, call)


def corpus_structure(
    tokens: NDArray[np.int32],
    lengths: Integers,
    namespaces: NDArray[np.uint64],
    short_index: NDArray[np.int32],
    long_index: NDArray[np.int32],
) -> SuffixCorpus:
    """The structure of a corpus, which points to its arrays. They must outlive it."""
    arrays = tokens, lengths, namespaces, short_index, long_index
    return SuffixCorpus(*(each.ctypes.data for each in arrays), len(short_index))


def match_sums(
    length_accepted: Floats, length_expected: Floats, group_accepted: Floats, group_expected: Floats
) -> MatchSums:
    """The structure of an acceptance estimate, which points to its arrays. They must outlive it."""
    arrays = length_accepted, length_expected, group_accepted, group_expected
    return MatchSums(*(each.ctypes.data for each in arrays))


def continuations(
    library: NativeLibrary,
    texts: StoredTexts,
    slots: Sequence[int],
    limits: Sequence[int],
    corpus: SuffixCorpus | None,
    sums: MatchSums,
) -> FoundContinuations:
    """Find the continuation of each text, and estimate the acceptance of its tokens.

    Args:
        library: the kernels.
        texts: the texts.
        slots: ``[texts]`` slots of the texts to continue, none empty.
        limits: ``[texts]`` maximum length of each continuation; 0 for texts to leave out.
        corpus: other texts; ``None`` without a corpus.
        sums: what the acceptance is estimated from.
    """
    found = FoundContinuations.nothing(slots, limits)
    call, integers = found.call, ctypes.c_int64 * len(slots)
    call.keep_alive = inputs = integers(*slots), integers(*limits)
    call.slots, call.limits = map(ctypes.addressof, inputs)
    call.texts, call.ends, call.namespaces, call.greedy = texts.addresses
    call.stride = texts.tokens.shape[1]
    call.corpus = None if corpus is None else ctypes.addressof(corpus)
    call.sums = ctypes.addressof(sums)
    library.continuations(ctypes.byref(call))
    return found


def learn_matches(
    library: NativeLibrary,
    found: FoundContinuations,
    num_known: Sequence[int],
    num_accepted: Sequence[int],
) -> None:
    """Learn the acceptance of found tokens.

    Args:
        library: the kernels.
        found: continuations that these kernels found.
        num_known: ``[texts]`` number of tokens up to the first rejected one.
        num_accepted: ``[texts]`` number of accepted tokens.
    """
    integers = ctypes.c_int64 * len(num_known)
    known, accepted = integers(*num_known), integers(*num_accepted)
    library.learn_matches(ctypes.byref(found.call), ctypes.byref(known), ctypes.byref(accepted))


def index_chunk(
    library: NativeLibrary, corpus: SuffixCorpus, chunk: int, first: int, end: int
) -> None:
    """Add the positions ``first`` … ``end - 1`` of a chunk to the indices of a corpus."""
    library.index_chunk(ctypes.byref(corpus), chunk, first, end)
