"""Models that compute the packed tokens of many requests in one pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftwise.checkpoints.quantization import StoredRows
from draftwise.errors import UnsupportedModelError
from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.packed import expanded_rows
from draftwise.kernels.native.projection import NativeProjection
from draftwise.models.decoder import DecoderForward
from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.fast_path import SlowPath
from draftwise.models.forward import ForwardPass
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.memory import upload
from draftwise.models.packing import PackedBatch, pack
from draftwise.models.ragged import RaggedKernels, fits_tokenwise
from draftwise.models.recurrent.computation import RecurrentPass
from draftwise.models.recurrent.shapes import RecurrentShapes
from draftwise.models.segment import Segment
from draftwise.models.static_steps import LARGEST_STEP, StaticSteps, StepMode
from draftwise.models.step_inputs import StepInputs
from draftwise.models.tree_tokens import SegmentTree, tree_tokens


class LazyEmbedding:
    """A token embedding in the blocks of a file.

    Attributes:
        dtype: of the expanded embedding.
        device: the CPU.
    """

    def __init__(self, stored: Sequence[StoredRows], dtype: torch.dtype) -> None:
        """Keep the rows."""
        self._stored = stored
        self.dtype, self.device = dtype, torch.device("cpu")

    def expanded(self) -> Tensor:
        """``[tokens, size]``."""
        return self._numbers(self._stored)

    def rows(self, ids: Tensor) -> Tensor:
        """``[rows, size]`` of the tokens ``[rows]``; the others are not expanded."""
        (whole,) = self._stored
        return self._numbers([whole.taken(ids)])

    def _numbers(self, stored: Sequence[StoredRows]) -> Tensor:
        library = native_library()
        assert library is not None
        return expanded_rows(stored, library).to(self.dtype)


def embedded(ids: Tensor, embedding: Tensor | LazyEmbedding) -> Tensor:
    """``[rows, size]`` embeddings of the tokens ``[rows]``."""
    if isinstance(embedding, LazyEmbedding):
        return embedding.rows(ids)
    return F.embedding(ids, embedding)


class PackedModel:
    """A model that computes the packed tokens of many requests in one pass.

    Attributes:
        role: ``"target"``, ``"draft"``, …; named in errors.
        family: what kind of model it is; named in errors.
        vocab_size: width of the logits.
        hidden_size: size of the residual stream.
        dtype: dtype of the weights.
        device: device of the weights.
        layers: shape of the keys and values that each layer stores per token.
        recurrent: what layers with a recurrence keep of a request; empty without such layers.
        native: Draftwise's native kernels for whole passes; ``None`` where they do not support the
            model.
        slow_path: why the model does not run on the fast path of its device; ``None`` if it does.
        step_mode: how decoding steps are run; may be changed between steps. Models without a
            forward pass of Draftwise's own always run eagerly.
    """

    def __init__(
        self,
        role: str,
        family: str,
        layers: list[LayerShape],
        vocab_size: int,
        hidden_size: int,
        embedding: Tensor | LazyEmbedding,
        native: NativeDecoder | None = None,
        forward: ForwardPass | None = None,
        slow_path: SlowPath | None = None,
        recurrent: RecurrentShapes | None = None,
    ) -> None:
        """Take over the parts of a model. Arguments that are not listed are attributes.

        Args:
            embedding: ``[tokens, size]`` the token embedding, in the dtype and on the device of the
                weights; or the rows that it is expanded from when it is needed.
            forward: the forward pass without native kernels; ``None`` where the native kernels or a
                subclass compute all passes.
        """
        self.role, self.family = role, family
        self.layers = layers
        self.recurrent = recurrent or RecurrentShapes()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self._embedding = embedding
        self.dtype, self.device = embedding.dtype, embedding.device
        self.native, self.slow_path = native, slow_path
        self.step_mode = StepMode.EAGER
        self._forward = forward
        self._decoder = forward if isinstance(forward, DecoderForward) else None
        self._kernels = RaggedKernels.of(self.device, self.dtype, layers)

    @property
    def embedding_as_stored(self) -> Tensor | LazyEmbedding:
        """As :attr:`embedding`, but in the blocks of a file where the model keeps them."""
        return self._embedding

    @property
    def embedding(self) -> Tensor:
        """``[tokens, size]`` the token embedding, in the dtype of the weights."""
        if isinstance(self._embedding, LazyEmbedding):
            self._embedding = self._embedding.expanded()
        return self._embedding

    def final_norm(self) -> Callable[[Tensor], Tensor]:
        """The norm between the last layer and the projection to the vocabulary.

        Raises:
            UnsupportedModelError: it is not found.
        """
        raise UnsupportedModelError(self.role, f"a {self.family} has no final norm of its own")

    def projection(self) -> Callable[[Tensor], Tensor]:
        """The projection to the vocabulary, with this model's weights.

        Returns:
            A function from features ``[rows, hidden]``, in the space of the hidden states after the
            final norm, to logits ``[rows, vocab]``.
        """
        if self.native is not None:
            return NativeProjection(self.native)
        assert self._forward is not None
        return self._forward.project

    def compile_for_trees(self) -> None:
        """Compile the kernels of passes over token trees, so that none is compiled while serving.

        Kernels of heads are compiled by their first pass.
        """
        if self._decoder is not None and self._kernels.fused:
            self._decoder.compile(self.new_cache(1, 1), trees=True)

    def new_cache(
        self, num_cache_slots: int, capacity: int, max_new_tokens: int | None = None
    ) -> KVCache:
        """Allocate a cache.

        Args:
            num_cache_slots: maximum number of requests in the cache.
            capacity: maximum number of tokens of a request.
            max_new_tokens: maximum number of new tokens of one request in one pass; ``None`` for
                no limit. With a limit, layers that attend to a window keep their newest tokens
                only.
        """
        cache = KVCache(
            self.layers,
            num_cache_slots,
            capacity,
            self.dtype,
            self.device,
            max_new_tokens,
            self.recurrent,
        )
        # The ragged kernels read only the valid tokens of a cache slot.
        cache.hides_stale = self._kernels.any
        return cache

    def forward(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        logit_rows: Sequence[int] | None,
        tap: StateTap | None = None,
        trees: Sequence[SegmentTree | None] | None = None,
    ) -> Tensor | None:
        """Compute packed tokens, write their keys and values, and advance the cache's lengths.

        Args:
            cache: this model's cache.
            tokens: ``[tokens]`` token ids, segment after segment.
            segments: ordered by cache slot.
            logit_rows: indices of the packed tokens whose logits are returned. With ``None`` the
                vocabulary projection is not computed.
            tap: collects hidden states of all packed tokens; ``None`` for none.
            trees: ``[segments]`` the token tree that each segment is part of, and ``None`` for
                segments of consecutive tokens; ``None`` without trees.

        Returns:
            Logits ``[len(logit_rows), vocab]``, or ``None`` if no logits were requested or there
            are no tokens.
        """
        if not segments:
            return None
        if cache.has_rings and max(each[2] for each in segments) > cache.max_new_tokens:
            raise ValueError(f"a pass has more than {cache.max_new_tokens} new tokens of a request")
        cache.begin_pass(segments)
        logits: Tensor | None
        tree = None if trees is None else tree_tokens(segments, trees)
        layers = None if tap is None else tap.layers
        if self.native is not None:
            logits = self.native(cache, tokens, segments, logit_rows or None, tap, tree)
        elif logit_rows is not None and self._fits_static(
            cache, tokens, segments, layers, trees is not None
        ):
            every = self._run_static(cache, tokens, segments, tap, tree)
            logits = every[upload(logit_rows, torch.long, self.device)]
        else:
            assert self._forward is not None
            ids, packed = self._pack(cache, tokens, segments, trees)
            logits = self._forward(ids, packed, logit_rows, tap)
        cache.advance_all(segments)
        return logits

    def forward_part(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        logit_rows: Sequence[int] | None,
        layers: range,
        entering: Tensor | None,
        adapter: ExitAdapter | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Compute some of the layers without native kernels.

        See :meth:`draftwise.models.model_part.ModelPart.forward`.
        """
        assert self._forward is not None
        ids, packed = self._pack(cache, tokens, segments)
        return self._forward.part(ids, packed, logit_rows, layers, entering, adapter)

    def static_steps(self, cache: KVCache, num_tokens: int) -> StaticSteps | None:
        """The steps of fixed sizes on a cache, for callers that record graphs.

        Returns:
            ``None`` where steps of ``num_tokens`` tokens run eagerly.
        """
        return self._static_steps(cache) if self._runs_static(cache, num_tokens) else None

    def next_logits(self, ids: Tensor, packed: PackedBatch, tap: StateTap | None = None) -> Tensor:
        """Logits of a planned pass that may be recorded, without waiting for the device.

        Args:
            ids: ``[tokens]`` token ids.
            packed: plan of the pass.
            tap: collects hidden states; ``None`` for none.

        Returns:
            ``[tokens, vocab]``.
        """
        assert self._decoder is not None
        hidden = self._decoder.hidden(ids, packed, tap)[: len(packed.positions)]
        return self._decoder.logits(hidden)

    def _run_static(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        tap: StateTap | None,
        tree: NDArray[np.void] | None,
    ) -> Tensor:
        """Logits ``[tokens, vocab]`` of a step of a fixed size, overwritten by the next step."""
        layers = None if tap is None else tap.layers

        def compute(ids: Tensor, packed: PackedBatch, _: Tensor | None) -> tuple[Tensor, ...]:
            own = None if layers is None else StateTap(layers)
            logits = self.next_logits(ids, packed, own)
            return (logits,) if own is None else (logits, own.rows)

        steps = self._static_steps(cache)
        results = steps.run(compute, layers, cache, tokens, segments, trees=tree)
        if tap is not None:
            tap.rows = results[1].clone()
        return results[0]

    def _pack(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        trees: Sequence[SegmentTree | None] | None = None,
    ) -> tuple[Tensor, PackedBatch]:
        """Token ids and the plan of a pass without padding."""
        ids, packed = self._packed(cache, tokens, segments, trees)
        if cache.recurrent is not None:
            packed = replace(packed, recurrent=RecurrentPass(cache.recurrent, segments))
        return ids, packed

    def _packed(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        trees: Sequence[SegmentTree | None] | None,
    ) -> tuple[Tensor, PackedBatch]:
        has_trees = trees is not None
        if not self._kernels.any or (has_trees and not self._kernels.fused):
            packed = pack(cache, segments, self.dtype, self.device, trees)
            return upload(tokens, torch.long, self.device), packed
        inputs = StepInputs(cache, len(tokens), len(segments), has_trees)
        inputs.fill(tokens, segments, None if trees is None else tree_tokens(segments, trees))
        longest = max(segment.num_tokens for segment in segments)
        return inputs.plan(cache, self._kernels, longest)

    def _fits_static(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        what: Hashable,
        has_trees: bool,
    ) -> bool:
        if not self._runs_static(cache, len(tokens)) or (has_trees and not self._kernels.fused):
            return False
        return self._static_steps(cache).has_room(len(tokens), segments, cache, what, has_trees)

    @property
    def never_waits(self) -> bool:
        """Whether its passes can be recorded, as they never wait for the device."""
        return self._decoder is not None

    def _runs_static(self, cache: KVCache, num_tokens: int) -> bool:
        return (
            self.step_mode is not StepMode.EAGER
            and self.never_waits
            and num_tokens <= LARGEST_STEP
            and (self._kernels.any or fits_tokenwise(num_tokens, cache.capacity, self.layers))
        )

    def _static_steps(self, cache: KVCache) -> StaticSteps:
        records = self.step_mode is StepMode.GRAPHS
        steps = cache.steps
        if not isinstance(steps, StaticSteps) or steps.records != records:
            steps = cache.steps = StaticSteps(self.device, self._kernels, records)
        return steps
