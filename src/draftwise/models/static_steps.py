"""Decoding steps of fixed sizes: the same kernels on the same memory every time.

A step of some tokens is filled up to the next size and run on buffers that stay where they are. On
CUDA the second step of a size is recorded as a graph and every later one replays it, so that it
costs one call whatever the model's number of layers. Sizes met once are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftwise.models.attention import PackedBatch, Segment
from draftwise.models.kv_cache import KVCache
from draftwise.models.ragged import RaggedKernels
from draftwise.models.step_numbers import StepNumbers

# Steps are filled up to a multiple of the second number, as long as the first is not reached.
_SIZES = ((4, 1), (32, 4), (128, 16), (512, 64), (1024, 128))
LARGEST_STEP = _SIZES[-1][0]
# Tokens of one request are filled up to this times a power of two.
_LEAST_QUERIES = 4
# Beyond this many sizes, steps of new ones are run as large as they are.
_MOST_SIZES = 96


class StepMode(StrEnum):
    """How a model's decoding steps are run.

    Attributes:
        EAGER: kernel by kernel, each step as large as it is.
        STATIC: filled up to fixed sizes, on fixed memory, kernel by kernel.
        GRAPHS: as ``STATIC``, recorded once per size and replayed. CUDA only.
    """

    EAGER = "eager"
    STATIC = "static"
    GRAPHS = "graphs"


def step_size(num_tokens: int) -> int:
    """The size that a step of so many tokens is filled up to, at most :data:`LARGEST_STEP`."""
    step = next(step for largest, step in _SIZES if num_tokens <= largest)
    return -(-num_tokens // step) * step


class Decoder(Protocol):
    """A model in two halves that never ask the host anything."""

    def hidden(self, ids: Tensor, packed: PackedBatch) -> Tensor:
        """``[tokens, hidden]`` of packed tokens ``[tokens]``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[tokens, vocab]``."""


class Recording:
    """Something that is run over and over on fixed memory, recorded when it is run again."""

    def __init__(self) -> None:
        self._was_run = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, work: Callable[[], None], pool: GraphPool | None) -> None:
        """Do the work; with a pool, from the second time on as a recorded graph.

        Args:
            work: the same at every call. What it leaves behind must be in memory that exists
                before.
            pool: where graphs keep what they need in between; ``None`` to record nothing.
        """
        if self._graph is not None:
            self._graph.replay()
        elif pool is None or not self._was_run:
            work()
            self._was_run = True
        else:
            self._graph = pool.record(work)
            self._graph.replay()


class GraphPool:
    """Memory shared by graphs that never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the kernels of some work without running them."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return graph


class _Key(NamedTuple):
    """Numbers of tokens, of requests and of the tokens of one request; each filled up."""

    num_tokens: int
    num_requests: int
    max_queries: int


class _Step:
    """The memory of one size and, once it was recorded, its graph."""

    def __init__(self, key: _Key, vocab_size: int, cache: KVCache) -> None:
        self.numbers = StepNumbers(cache, key.num_tokens, key.num_requests)
        self.logits = torch.empty(
            key.num_tokens, vocab_size, dtype=cache.dtype, device=cache.device
        )
        self._key = key
        self._recording = Recording()

    def run(
        self, decoder: Decoder, cache: KVCache, kernels: RaggedKernels, pool: GraphPool | None
    ) -> None:
        """Compute :attr:`logits` ``[num_tokens, vocab]`` of what the numbers say."""
        size, max_queries = self._key.num_tokens, self._key.max_queries

        def work() -> None:
            ids, packed = self.numbers.plan(cache, kernels, max_queries)
            self.logits.copy_(decoder.logits(decoder.hidden(ids, packed)[:size]))

        self._recording.run(work, pool)


class StaticSteps:
    """The steps of fixed sizes of one model on one cache.

    Attributes:
        kernels: to attend with, if there are any.
        records: whether what is run again is recorded.
        pool: memory of the recordings; ``None`` where nothing is recorded.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, kernels: RaggedKernels, graphs: bool
    ) -> None:
        """Set up; memory is taken when a size is met for the first time.

        Args:
            vocab_size: width of the logits.
            device: where the model is.
            kernels: to attend with, if there are any.
            graphs: whether to record what is run again.
        """
        self._vocab_size = vocab_size
        self.kernels = kernels
        self.records = graphs
        self.pool = GraphPool(device) if graphs else None
        self._steps: dict[_Key, _Step] = {}

    @property
    def num_sizes(self) -> int:
        """Sizes that were met."""
        return len(self._steps)

    @torch.inference_mode()
    def run(
        self,
        decoder: Decoder,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
    ) -> Tensor:
        """Compute packed tokens and write their keys and values.

        Args:
            decoder: the model.
            cache: always the same.
            tokens: ``[tokens]``, at most :data:`LARGEST_STEP`.
            segments: ordered by row.

        Returns:
            ``[tokens, vocab]``, overwritten by the next step.
        """
        key = self._key(len(tokens), segments, cache)
        if key not in self._steps:
            self._steps[key] = _Step(key, self._vocab_size, cache)
        step = self._steps[key]
        step.numbers.fill(tokens, segments)
        step.run(decoder, cache, self.kernels, self.pool)
        return step.logits[: len(tokens)]

    def has_room(self, num_tokens: int, segments: Sequence[Segment], cache: KVCache) -> bool:
        """Whether a step is of a size that was met, or new sizes may still be met."""
        known = self._key(num_tokens, segments, cache) in self._steps
        return known or len(self._steps) < _MOST_SIZES

    @staticmethod
    def _key(num_tokens: int, segments: Sequence[Segment], cache: KVCache) -> _Key:
        longest = max(segment.num_tokens for segment in segments)
        size = step_size(num_tokens)
        if longest == 1:
            # With one token for each there may be more of them, those filling up, than rows.
            return _Key(size, size, 1)
        requests = min(step_size(len(segments)), size, cache.num_rows)
        return _Key(
            size, requests, min(_LEAST_QUERIES << max(0, (longest - 1).bit_length() - 2), size)
        )
