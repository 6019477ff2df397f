"""The search for continuations of texts, by the kernels of ``suffix.h``."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.models.native.library import NativeLibrary
from draftwise.models.native.structures import ContinuationCall, SuffixCorpus


class FoundContinuations(NamedTuple):
    """Continuations of several texts.

    Attributes:
        tokens: ``[texts, width]`` int32, 0 beyond a continuation's length.
        shares: ``[texts, width]`` float64, the share of the votes of each token.
        votes: ``[texts, width]`` int64, number of votes for each token.
        lengths: ``[texts]`` int64, number of proposed tokens.
        match_lengths: ``[texts]`` int64, number of matching tokens before the continuation.
        chunks: ``[texts]`` int64, the continued chunk of the corpus; -1 for the text itself.
    """

    tokens: NDArray[np.int32]
    shares: NDArray[np.float64]
    votes: NDArray[np.int64]
    lengths: NDArray[np.int64]
    match_lengths: NDArray[np.int64]
    chunks: NDArray[np.int64]

    @classmethod
    def nothing(cls, num_texts: int, width: int) -> FoundContinuations:
        """No continuation for any text, in new arrays."""
        shape = num_texts, width
        return cls(
            np.zeros(shape, dtype=np.int32),
            np.zeros(shape),
            np.zeros(shape, dtype=np.int64),
            np.zeros(num_texts, dtype=np.int64),
            np.zeros(num_texts, dtype=np.int64),
            np.full(num_texts, -1, dtype=np.int64),
        )


def corpus_structure(
    tokens: NDArray[np.int32],
    lengths: NDArray[np.int64],
    namespaces: NDArray[np.uint64],
    short_index: NDArray[np.int32],
    long_index: NDArray[np.int32],
) -> SuffixCorpus:
    """The structure of a corpus, which points to its arrays. They must outlive it."""
    arrays = tokens, lengths, namespaces, short_index, long_index
    return SuffixCorpus(*(each.ctypes.data for each in arrays), len(short_index))


def continuations(
    library: NativeLibrary,
    texts: NDArray[np.int32],
    ends: NDArray[np.int64],
    slots: NDArray[np.int64],
    namespaces: NDArray[np.uint64],
    corpus: SuffixCorpus | None,
    max_tokens: int,
) -> FoundContinuations:
    """Find the continuation of each text.

    Args:
        library: the kernels.
        texts: ``[slots, length]`` tokens of all slots, contiguous.
        ends: ``[slots]`` number of tokens of each slot's text, at least 1 for those searched.
        slots: ``[texts]`` slots of the texts to continue.
        namespaces: ``[texts]`` their namespaces.
        corpus: other texts; ``None`` without a corpus.
        max_tokens: maximum length of a continuation, at least 1.
    """
    found = FoundContinuations.nothing(len(slots), max_tokens)
    call = ContinuationCall(
        texts.ctypes.data,
        ends.ctypes.data,
        slots.ctypes.data,
        namespaces.ctypes.data,
        None if corpus is None else ctypes.addressof(corpus),
        *(each.ctypes.data for each in found),
        len(slots),
        texts.shape[1],
        max_tokens,
    )
    library.continuations(ctypes.byref(call))
    return found


def index_chunk(
    library: NativeLibrary, corpus: SuffixCorpus, chunk: int, first: int, end: int
) -> None:
    """Add the positions ``first`` … ``end - 1`` of a chunk to the indices of a corpus."""
    library.index_chunk(ctypes.byref(corpus), chunk, first, end)
