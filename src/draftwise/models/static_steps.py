"""Decoding steps of fixed sizes, which run the same kernels on the same memory every time.

A step is padded to the next size and runs on persistent buffers. On CUDA the second step of a size
is captured as a CUDA graph, and every later one replays the graph in one call, for any number of
layers. A size that occurs once is not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftwise.models.attention import PackedBatch, Segment
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.ragged import RaggedKernels
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
    """Work that is repeated on fixed memory and captured as a CUDA graph on its second run."""

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
        elif pool is None or not self._was_run:
            work()
            self._was_run = True
        else:
            self._graph = pool.record(work)
            self._graph.replay()


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


class _Key(NamedTuple):
    """A step's size: its tokens, its requests and the tokens of one request, each padded.

    Steps that return different hidden states are kept apart.
    """

    num_tokens: int
    num_requests: int
    max_queries: int
    state_layers: tuple[int, ...] = ()


class _Step:
    """The buffers of one size, and its CUDA graph once it was captured."""

    def __init__(self, key: _Key, vocab_size: int, cache: KVCache) -> None:
        self.inputs = StepInputs(cache, key.num_tokens, key.num_requests)
        self.logits = torch.empty(
            key.num_tokens, vocab_size, dtype=cache.dtype, device=cache.device
        )
        self.states: Tensor | None = None
        self._key = key
        self._recording = Recording()

    def run(
        self, decoder: Decoder, cache: KVCache, kernels: RaggedKernels, pool: GraphPool | None
    ) -> None:
        """Compute :attr:`logits` ``[num_tokens, vocab]`` of :attr:`inputs`, and the states."""
        size, max_queries = self._key.num_tokens, self._key.max_queries

        def work() -> None:
            ids, packed = self.inputs.plan(cache, kernels, max_queries)
            layers = self._key.state_layers
            tap = StateTap(layers) if layers else None
            self.logits.copy_(decoder.logits(decoder.hidden(ids, packed, tap)[:size]))
            if tap is not None:
                if self.states is None:  # the first run, which is never captured
                    self.states = torch.empty_like(tap.rows)
                self.states.copy_(tap.rows)

        self._recording.run(work, pool)


class StaticSteps:
    """The steps of fixed sizes of one model on one cache.

    Attributes:
        kernels: available attention kernels.
        records: whether repeated steps are captured as CUDA graphs.
        pool: memory pool of the graphs; ``None`` where nothing is captured.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, kernels: RaggedKernels, graphs: bool
    ) -> None:
        """Set up. A size's buffers are allocated when it first occurs.

        Args:
            vocab_size: width of the logits.
            device: device of the model.
            kernels: available attention kernels.
            graphs: whether to capture repeated steps as CUDA graphs.
        """
        self._vocab_size = vocab_size
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
        decoder: Decoder,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        tap: StateTap | None = None,
    ) -> Tensor:
        """Compute packed tokens and write their keys and values.

        Args:
            decoder: the model.
            cache: the same cache at every call.
            tokens: ``[tokens]`` token ids, at most :data:`LARGEST_STEP`.
            segments: ordered by cache slot.
            tap: collects a copy of the hidden states; ``None`` for none.

        Returns:
            Logits ``[tokens, vocab]``, overwritten by the next step.
        """
        key = self._key(len(tokens), segments, cache, tap)
        if key not in self._steps:
            self._steps[key] = _Step(key, self._vocab_size, cache)
        step = self._steps[key]
        step.inputs.fill(tokens, segments)
        step.run(decoder, cache, self.kernels, self.pool)
        if tap is not None:
            assert step.states is not None
            tap.rows = step.states[: len(tokens)].clone()
        return step.logits[: len(tokens)]

    def has_room(
        self,
        num_tokens: int,
        segments: Sequence[Segment],
        cache: KVCache,
        tap: StateTap | None = None,
    ) -> bool:
        """Whether the size of a step is known already, or another size may still be added."""
        known = self._key(num_tokens, segments, cache, tap) in self._steps
        return known or len(self._steps) < _MAX_SIZES

    @staticmethod
    def _key(
        num_tokens: int, segments: Sequence[Segment], cache: KVCache, tap: StateTap | None
    ) -> _Key:
        layers = () if tap is None else tap.layers
        longest = max(segment.num_tokens for segment in segments)
        size = step_size(num_tokens)
        if longest == 1:
            # Each padding token is a request of its own, so that there may be more requests than
            # cache slots.
            return _Key(size, size, 1, layers)
        requests = min(step_size(len(segments)), size, cache.num_cache_slots)
        queries = min(_MIN_QUERIES << max(0, (longest - 1).bit_length() - 2), size)
        return _Key(size, requests, queries, layers)
