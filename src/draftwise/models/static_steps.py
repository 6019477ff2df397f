"""Decoding steps of fixed sizes, which run the same kernels on the same memory every time.

A step is padded to the next size and runs on persistent buffers. On CUDA the second step of a size
is captured as a CUDA graph, and every later one replays the graph in one call, for any number of
layers. A size that occurs once is not captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.packing import PackedBatch
from draftwise.models.ragged import RaggedKernels
from draftwise.models.segment import Segment
from draftwise.models.step_inputs import StepInputs

# (largest step, multiple): steps up to the first number of tokens are padded to a multiple of the
# second.
_SIZES = ((4, 1), (32, 4), (128, 16), (512, 64), (1024, 128))
LARGEST_STEP = _SIZES[-1][0]
# The maximum number of tokens per request is rounded up to this number times a power of two.
_MIN_QUERIES = 4
# Maximum number of sizes that are kept. Steps of further sizes run eagerly.
_MAX_SIZES = 96


class StepMode(StrEnum):
    """How a model's decoding steps are run.

    Attributes:
        EAGER: kernel by kernel, without padding.
        STATIC: kernel by kernel, padded to fixed sizes, on fixed memory.
        GRAPHS: as ``STATIC``, captured once per size as a CUDA graph and replayed. CUDA only.
    """

    EAGER = "eager"
    STATIC = "static"
    GRAPHS = "graphs"


def step_size(num_tokens: int) -> int:
    """The size that a step of ``num_tokens`` tokens is padded to.

    Args:
        num_tokens: at most :data:`LARGEST_STEP`.
    """
    step = next(step for largest, step in _SIZES if num_tokens <= largest)
    return -(-num_tokens // step) * step


class Decoder(Protocol):
    """A model whose forward pass never synchronises with the host, so that it can be captured."""

    def hidden(self, ids: Tensor, packed: PackedBatch, tap: StateTap | None = None) -> Tensor:
        """Hidden states ``[tokens, hidden]`` of packed token ids ``[tokens]``.

        Hidden states before layers are offered to ``tap`` if there is one.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[tokens, vocab]`` of hidden states ``[tokens, hidden]``."""


class Recording:
    """Work that is repeated on fixed memory and captured as a CUDA graph on its second run.

    Attributes:
        num_prepared: counts up at the start and at the end of each run, of any recording, that
            takes longer than a replay, because it captures the work or comes before that.
    """

    num_prepared: ClassVar[int] = 0
    _counting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._was_run = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, work: Callable[[], None], pool: GraphPool | None) -> None:
        """Do the work. With a pool, the second run is captured and later ones replay the graph.

        Args:
            work: the same callable at every call. It must write its results to memory that was
                allocated before.
            pool: memory for the graph's intermediate results; ``None`` to capture nothing.
        """
        if self._graph is not None:
            self._graph.replay()
            return
        if pool is None:
            work()
            return
        self._count()
        if self._was_run:
            self._graph = pool.record(work)
            self._graph.replay()
        else:
            work()
            self._was_run = True
        self._count()

    @classmethod
    def _count(cls) -> None:
        with cls._counting:
            cls.num_prepared += 1


class GraphPool:
    """Memory pool shared by CUDA graphs that never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture the kernels of some work without running them."""
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


# What a step computes: (ids [tokens], plan, entering [tokens, size] or None) -> results, each
# [tokens, ...]. It never synchronises with the host.
Compute = Callable[[Tensor, PackedBatch, Tensor | None], tuple[Tensor, ...]]


class _Key(NamedTuple):
    """A step's size: its tokens, its requests and the tokens of one request, each padded.

    Steps of the same size that compute different things are kept apart by ``what``, and steps with
    token trees from others.
    """

    num_tokens: int
    num_requests: int
    max_queries: int
    what: Hashable = None
    has_trees: bool = False


class _Step:
    """The buffers of one size, and its CUDA graph once it was captured.

    Attributes:
        inputs: tokens and their places in the cache.
        entering: ``[num_tokens, size]`` what the step reads beside its tokens; ``None`` for
            nothing.
        results: what it computes, each ``[num_tokens, ...]``.
    """

    def __init__(self, key: _Key, cache: KVCache, entering: Tensor | None) -> None:
        self.inputs = StepInputs(cache, key.num_tokens, key.num_requests, key.has_trees)
        self.entering: Tensor | None = None
        if entering is not None:
            self.entering = entering.new_zeros(key.num_tokens, entering.shape[1])
        self.results: tuple[Tensor, ...] = ()
        self._max_queries = key.max_queries
        self._recording = Recording()

    def run(
        self, compute: Compute, cache: KVCache, kernels: RaggedKernels, pool: GraphPool | None
    ) -> None:
        """Compute :attr:`results` of :attr:`inputs` and :attr:`entering`."""

        def work() -> None:
            ids, packed = self.inputs.plan(cache, kernels, self._max_queries)
            results = compute(ids, packed, self.entering)
            if not self.results:  # the first run, which is never captured
                self.results = tuple(torch.empty_like(each) for each in results)
            for kept, each in zip(self.results, results, strict=True):
                kept.copy_(each)

        self._recording.run(work, pool)


class StaticSteps:
    """The steps of fixed sizes of one model on one cache.

    Attributes:
        kernels: available attention kernels.
        records: whether repeated steps are captured as CUDA graphs.
        pool: memory pool of the graphs; ``None`` where nothing is captured.
    """

    def __init__(self, device: torch.device, kernels: RaggedKernels, graphs: bool) -> None:
        """Set up. A size's buffers are allocated when it first occurs.

        Args:
            device: device of the model.
            kernels: available attention kernels.
            graphs: whether to capture repeated steps as CUDA graphs.
        """
        self.kernels = kernels
        self.records = graphs
        self.pool = GraphPool(device) if graphs else None
        self._steps: dict[_Key, _Step] = {}

    @property
    def num_sizes(self) -> int:
        """Number of sizes that occurred."""
        return len(self._steps)

    @torch.inference_mode()
    def run(
        self,
        compute: Compute,
        what: Hashable,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        entering: Tensor | None = None,
        trees: NDArray[np.void] | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute packed tokens and write their keys and values.

        Args:
            compute: what is computed.
            what: names it. Calls with the same name compute the same.
            cache: the same cache at every call.
            tokens: ``[tokens]`` token ids, at most :data:`LARGEST_STEP`.
            segments: ordered by cache slot.
            entering: ``[tokens, size]`` what is read beside the tokens; ``None`` for nothing.
            trees: ``[tokens]`` of ``TREE_TOKEN``; ``None`` without token trees, which need the
                fused kernel.

        Returns:
            The results, each ``[tokens, ...]``. The next step overwrites them.
        """
        count = len(tokens)
        key = self._key(count, segments, cache, what, trees is not None)
        if key not in self._steps:
            self._steps[key] = _Step(key, cache, entering)
        step = self._steps[key]
        step.inputs.fill(tokens, segments, trees)
        if entering is not None:
            assert step.entering is not None
            step.entering[:count].copy_(entering)
        step.run(compute, cache, self.kernels, self.pool)
        return tuple(each[:count] for each in step.results)

    def has_room(
        self,
        num_tokens: int,
        segments: Sequence[Segment],
        cache: KVCache,
        what: Hashable = None,
        has_trees: bool = False,
    ) -> bool:
        """Whether the size of a step is known already, or another size may still be added.

        Args:
            num_tokens: number of tokens.
            segments: ordered by cache slot.
            cache: the same cache at every call.
            what: see :meth:`run`.
            has_trees: whether any of the tokens is in a token tree.
        """
        known = self._key(num_tokens, segments, cache, what, has_trees) in self._steps
        return known or len(self._steps) < _MAX_SIZES

    @staticmethod
    def _key(
        num_tokens: int,
        segments: Sequence[Segment],
        cache: KVCache,
        what: Hashable,
        has_trees: bool,
    ) -> _Key:
        longest = max(segment.num_tokens for segment in segments)
        size = step_size(num_tokens)
        if longest == 1:
            # Each padding token is a request of its own, so that there may be more requests than
            # cache slots.
            return _Key(size, size, 1, what, has_trees)
        requests = min(step_size(len(segments)), size, cache.num_cache_slots)
        queries = min(_MIN_QUERIES << max(0, (longest - 1).bit_length() - 2), size)
        return _Key(size, requests, queries, what, has_trees)
