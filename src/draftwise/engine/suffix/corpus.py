"""A corpus: texts that drafts may continue, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from os import PathLike
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftwise.engine.suffix.search import CORPUS_CHUNK, MAX_MATCH, WAYS, CorpusArrays, index_chunk
from draftwise.errors import InvalidParameterError
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.suffix import corpus_structure
from draftwise.kernels.native.suffix import index_chunk as native_index_chunk
from draftwise.speculation import MAX_CORPUS_TOKENS

PUBLIC = 0
_FORMAT = "draftwise-corpus-1"


def namespace_of(salt: str) -> int:
    """The namespace of a salt. The empty salt has its own, which is not the public one."""
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class SuffixCorpus:
    """Token sequences of earlier outputs and of given documents. Safe to use from several threads.

    A sequence is stored in chunks. If the memory is full, the chunk that was continued or added
    least recently is overwritten. Each chunk belongs to a namespace. A text is continued only by
    chunks of its own namespace and by public ones.

    Memory: between 20 and 36 bytes per token, because a hash table has a power of two as its size.

    Attributes:
        is_open: whether texts are added. Otherwise :meth:`add` does nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        """Allocate memory.

        Args:
            max_tokens: number of tokens that are stored, rounded up to whole chunks.

        Raises:
            InvalidParameterError: ``max_tokens`` is out of range.
        """
        if not 1 <= max_tokens <= MAX_CORPUS_TOKENS:
            raise InvalidParameterError(
                "corpus_tokens", f"must be from 1 to {MAX_CORPUS_TOKENS}, got {max_tokens}"
            )
        num_chunks = -(-max_tokens // CORPUS_CHUNK)
        num_buckets = 2 ** max(4, (2 * num_chunks * CORPUS_CHUNK // WAYS - 1).bit_length())
        self.arrays = CorpusArrays(
            np.zeros((num_chunks, CORPUS_CHUNK), dtype=np.int32),
            np.zeros(num_chunks, dtype=np.int64),
            np.zeros(num_chunks, dtype=np.uint64),
            np.full((num_buckets, WAYS), -1, dtype=np.int32),
            np.full((num_buckets, WAYS), -1, dtype=np.int32),
        )
        self.structure = corpus_structure(*vars(self.arrays).values())
        self.lock = RLock()
        self._last_used = np.zeros(num_chunks, dtype=np.int64)
        self._num_context = np.zeros(num_chunks, dtype=np.int64)
        self._clock = 0
        self._num_used = 0
        self.is_open = True

    @property
    def max_tokens(self) -> int:
        """Number of tokens that fit."""
        return self.arrays.tokens.size

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens. Tokens around the border of two chunks are counted twice."""
        return int(self.arrays.lengths.sum())

    def add(self, tokens: Sequence[int], namespace: int = PUBLIC, num_context: int = 0) -> None:
        """Store a sequence.

        Args:
            tokens: the tokens, each below 2³¹.
            namespace: namespace of :func:`namespace_of`; by default all texts may be continued.
            num_context: number of first tokens that are stored only as the context of the others,
                so that no text is continued by them.
        """
        whole = np.asarray(tokens, dtype=np.int32)
        whole = whole[max(0, num_context - MAX_MATCH) :]
        num_context = min(num_context, MAX_MATCH)
        with self.lock:
            start = 0 if self.is_open else len(whole)
            while len(whole) - start > max(num_context, 1):
                part = whole[start : start + CORPUS_CHUNK]
                self._store(part, namespace, num_context)
                start += CORPUS_CHUNK - MAX_MATCH
                num_context = MAX_MATCH

    def _store(self, part: NDArray[np.int32], namespace: int, num_context: int) -> None:
        """Store one chunk."""
        arrays = self.arrays
        if self._num_used < len(arrays.lengths):
            chunk = self._num_used
            self._num_used += 1
        else:
            chunk = int(self._last_used.argmin())
        arrays.tokens[chunk, : len(part)] = part
        arrays.lengths[chunk] = len(part)
        arrays.namespaces[chunk] = namespace
        self._num_context[chunk] = num_context
        self.use([chunk])
        # Positions in the context are indexed in the chunk before. The last one has no next token.
        first, end = max(0, num_context - 1), len(part) - 1
        library = native_library()
        if library is None:
            index_chunk(arrays, chunk, first, end)
        else:
            native_index_chunk(library, self.structure, chunk, first, end)

    def use(self, chunks: Sequence[int] | NDArray[np.int64]) -> None:
        """Note that chunks were continued just now."""
        self._clock += 1
        self._last_used[chunks] = self._clock

    def save(self, path: str | PathLike[str], tokenizer: str = "") -> None:
        """Write all chunks to a safetensors file, with those used least recently first.

        Namespaces are hashes of salts, which the file does not contain.

        Args:
            path: the file.
            tokenizer: fingerprint of the tokenizer that the tokens come from.
        """
        with self.lock:
            order = np.argsort(self._last_used[: self._num_used], kind="stable")
            tensors = {
                "tokens": torch.from_numpy(self.arrays.tokens[order]),
                "lengths": torch.from_numpy(self.arrays.lengths[order]),
                "namespaces": torch.from_numpy(self.arrays.namespaces[order].view(np.int64)),
                "num_context": torch.from_numpy(self._num_context[order]),
            }
        # These are copies. Searches go on while the file is written.
        save_file(tensors, path, {"format": _FORMAT, "tokenizer": tokenizer})

    def load(self, path: str | PathLike[str], tokenizer: str = "") -> None:
        """Add the chunks of a file that :meth:`save` wrote.

        Raises:
            InvalidParameterError: the file is no corpus, is damaged, or was made with another
                tokenizer.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != _FORMAT:
                raise InvalidParameterError("corpus", f"{str(path)!r} is no corpus of Draftwise")
            if metadata.get("tokenizer") != tokenizer:
                raise InvalidParameterError(
                    "corpus", f"{str(path)!r} was made with the tokenizer of another model"
                )
            _check_chunks(tensors)
            rows = zip(
                tensors["tokens"],
                tensors["lengths"].tolist(),
                tensors["namespaces"].view(np.uint64).tolist(),
                tensors["num_context"].tolist(),
                strict=True,
            )
            with self.lock:
                for tokens, length, namespace, num_context in rows:
                    self._store(tokens[:length], namespace, num_context)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise InvalidParameterError(
                "corpus", f"{str(path)!r} cannot be read: {error}"
            ) from error


def _check_chunks(tensors: Mapping[str, NDArray[Any]]) -> None:
    """Check the arrays of a corpus file before any chunk is stored.

    Raises:
        KeyError: an array is missing.
        ValueError: an array has the wrong shape, type or values.
    """
    tokens = tensors["tokens"]
    if tokens.dtype != np.int32 or tokens.ndim != 2 or tokens.shape[1] != CORPUS_CHUNK:
        raise ValueError(f"tokens must be int32 and [chunks, {CORPUS_CHUNK}]")
    for name in ("lengths", "namespaces", "num_context"):
        if tensors[name].dtype != np.int64 or tensors[name].shape != (len(tokens),):
            raise ValueError(f"{name} must be int64 and have one entry per chunk")
    lengths, num_context = tensors["lengths"], tensors["num_context"]
    if ((lengths < 1) | (lengths > CORPUS_CHUNK)).any():
        raise ValueError(f"lengths must be from 1 to {CORPUS_CHUNK}")
    if ((num_context < 0) | (num_context > lengths)).any():
        raise ValueError("num_context must be from 0 to the length of the chunk")
    if (tokens < 0).any():
        raise ValueError("tokens must not be negative")
