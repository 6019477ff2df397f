"""Forward pass of Llama and models with similar layers in a single kernel call.

A step of a small model takes as long as a few calls into PyTorch. In a step of a large model, the
operations between the matrix products take a fifth of the time. As for every model, the logits are
compared with Hugging Face's at load.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwise.checkpoints.quantization import (
    BlockRows,
    QuantizedMatrix,
    forget_stored,
    quantized_matrix,
    stored_rows,
)
from draftwise.kernels.native.experts import NativeExperts, are_packed
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.narrow import (
    COMPRESSED_BITS,
    QUANTIZED_BITS,
    compressed_weight,
    quantized_weight,
)
from draftwise.kernels.native.packed import PACKED, embedding_blocks, packed_weight, rows_of
from draftwise.kernels.native.panels import interleaved, padded_to_panels, panels
from draftwise.kernels.native.recurrent import recurrent_layer, recurrent_memory
from draftwise.kernels.native.structures import (
    DecoderCache,
    DecoderCall,
    DecoderLayer,
    DecoderModel,
    RecurrentLayer,
)
from draftwise.models.decoder_spec import Activation, DecoderSpec, LayerSpec, NormSpec
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import ReusedMemory, ScratchMemory, in_large_pages

# Activations in the order of ``Activation`` of ``decoder.h``.
ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH)


class NativeDecoder:
    """A decoder-only model that Draftwise's kernels compute.

    Attributes:
        bits: stored bits per number of a linear layer: 8 for quantised integers with a scale per
            output, 12 for losslessly compressed bfloat16, 0 for integers with a scale per group of
            inputs, whose rows are rounded to 8 bits, otherwise those of the dtype.
        dtype: dtype of the embedding.
        num_embeddings: number of token ids.
        hidden_size: size of the residual stream.
        vocab_size: width of the logits; 0 for a drafting head whose output the caller projects.
        weight_bytes: bytes of the matrices that a pass over one token reads, without the embedding
            and the projection of a target.
    """

    # Index in the cache of the first layer that is computed.
    _first_layer = 0

    def __init__(self, spec: DecoderSpec, library: NativeLibrary, bits: int) -> None:
        """Pack the weights of a model. Its own linear layers lose their weights.

        Args:
            spec: the model.
            library: the compiled kernels.
            bits: stored bits per number of a linear layer: ``QUANTIZED_BITS`` or ``PACKED`` for a
                model whose quantised weights were dequantised, ``COMPRESSED_BITS`` for lossless
                compression of bfloat16, or those of the dtype.
        """
        self._library = library
        self.bits = bits
        self._kept: list[Tensor] = []
        self._experts: list[NativeExperts] = []
        self._recurrent: list[RecurrentLayer] = []
        self._recurrences = [layer.recurrence for layer in spec.layers]
        self.weight_bytes = 0
        embedding = spec.embedding
        self.dtype = embedding.weight.dtype
        self.num_embeddings = embedding.num_embeddings
        self.hidden_size = spec.hidden_size
        self.vocab_size = 0 if spec.head is None else spec.head.out_features
        self._rotary_keys = sorted(spec.rotary)
        self._rotary = [spec.rotary[key] for key in self._rotary_keys]
        layers = (DecoderLayer * len(spec.layers))()
        packs_experts = are_packed(spec.experts)
        for to, layer in zip(layers, spec.layers, strict=True):
            self._pack_layer(to, layer, packs_experts)
        head = None
        if spec.head is not None:
            head = self._keep_matrix(spec.head)
            release_weight(spec.head)
        self._layers = layers
        rotary_sizes = torch.tensor([each.size for each in self._rotary], dtype=torch.int64)
        blocks = embedding_blocks(stored_rows(embedding))
        self._model = DecoderModel(
            None if blocks else self._keep(embedding.weight.detach()),
            self._keep(spec.norm.weight),
            head,
            ctypes.addressof(layers),
            self._keep(rotary_sizes),
            len(layers),
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            self.vocab_size,
            packs_experts,
            self.dtype == torch.bfloat16,
            bits,
            ACTIVATIONS.index(spec.activation),
            spec.has_gates,
            spec.norm.epsilon,
            spec.scaling,
            spec.softcap or 0.0,
            spec.embedding_scale,
            spec.residual_scale,
            spec.logit_scale,
            spec.logit_softcap or 0.0,
        )
        if blocks is not None:
            self._keep_blocks(*blocks)
        self._tables: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._caches: WeakKeyDictionary[KVCache, tuple[DecoderCache, Any]] = WeakKeyDictionary()
        # Parts of the model use the same memory, as they never run at the same time.
        self._scratch = ScratchMemory()
        self._logits = ReusedMemory()
        self._sizes: dict[tuple[int, int, int], int] = {}

    def _keep_blocks(self, rows: BlockRows, kind: NDArray[np.void]) -> None:
        """Read the embedding from the blocks of a file."""
        self._embedding_blocks = rows, kind
        self._model.embedding = rows.data.ctypes.data
        self._model.embedding_kind = kind.ctypes.data
        self._model.embedding_row_bytes = rows.data.shape[1]

    def _keep(self, tensor: Tensor) -> int:
        """Keep a reference to a tensor, made contiguous, and return its address."""
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _keep_norm(self, norm: NormSpec | None) -> int | None:
        """The address of a norm's weight; ``None`` if there is no norm."""
        return None if norm is None else self._keep(norm.weight)

    def _keep_biases(self, layers: Sequence[nn.Linear]) -> int | None:
        """The address of the biases of joined layers; ``None`` if there is no bias."""
        if all(each.bias is None for each in layers):
            return None
        biases = [
            torch.zeros(each.out_features) if each.bias is None else each.bias.detach().float()
            for each in layers
        ]
        return self._keep(padded_to_panels(torch.cat(biases), self._library))

    def _keep_matrix(
        self, *layers: nn.Linear, interleave: bool = False, order: Tensor | None = None
    ) -> int:
        """Pack the weights of layers with the same input, concatenated; returns the address.

        Args:
            layers: the layers.
            interleave: whether to interleave the first and the second half of the columns.
            order: ``[columns]`` int64 columns in another order; ``None`` for that of the layers.
        """
        packed = self._packed(layers, interleave, order)
        self.weight_bytes += packed.nbytes
        return self._keep(packed)

    def _packed(
        self, layers: Sequence[nn.Linear], interleave: bool, order: Tensor | None
    ) -> Tensor:
        library = self._library
        if self.bits == PACKED:
            return packed_weight(rows_of(layers, order), library, interleave)

        def joined(parts: list[Tensor]) -> Tensor:
            whole = torch.cat(parts)
            if order is not None:
                return whole[order]
            if not interleave:
                return whole
            first, second = whole.chunk(2)
            return interleaved(first, second, library)

        if self.bits == QUANTIZED_BITS:
            known = _quantized(layers)
            whole = QuantizedMatrix(
                joined([each.numbers for each in known]), joined([each.scales for each in known])
            )
            return in_large_pages(quantized_weight(whole, library))
        weight = panels(joined([layer.weight.detach() for layer in layers]), library)
        if self.bits == COMPRESSED_BITS:
            return in_large_pages(compressed_weight(weight, library))
        return in_large_pages(weight)

    def _pack_layer(self, to: DecoderLayer, layer: LayerSpec, packs_experts: bool) -> None:
        """Pack the weights of a layer."""
        to.attention_norm = self._keep_norm(layer.attention_norm)
        to.mlp_norm = self._keep_norm(layer.mlp_norm)
        to.attention_out_norm = self._keep_norm(layer.attention_out_norm)
        to.mlp_out_norm = self._keep_norm(layer.mlp_out_norm)
        to.q_norm, to.k_norm = self._keep_norm(layer.q_norm), self._keep_norm(layer.k_norm)
        to.q_norm_size = 0 if layer.q_norm is None else len(layer.q_norm.weight)
        to.k_norm_size = 0 if layer.k_norm is None else len(layer.k_norm.weight)
        to.rotary = -1 if layer.rotary is None else self._rotary_keys.index(layer.rotary)
        order = None if layer.recurrence is None else layer.recurrence.order
        to.qkv = self._keep_matrix(*layer.qkv, order=order)
        to.out = self._keep_matrix(layer.out)
        if layer.down is not None:
            to.gate_up = self._keep_matrix(*layer.gate_up, interleave=True)
            to.down = self._keep_matrix(layer.down)
        to.intermediate = layer.intermediate_size
        if layer.experts is not None:
            experts = NativeExperts(layer.experts, self._library, packs_experts)
            self._experts.append(experts)
            self.weight_bytes += experts.bytes_of_a_token
            to.experts = ctypes.addressof(experts.structure)
        to.qkv_bias, to.out_bias = self._keep_biases(layer.qkv), self._keep_biases([layer.out])
        if layer.sinks is not None:
            to.sinks = self._keep(layer.sinks)
        if layer.recurrence is not None:
            self._recurrent.append(recurrent_layer(layer.recurrence, self._keep))
            to.recurrent = ctypes.addressof(self._recurrent[-1])
        for each in layer.linear_layers:
            release_weight(each)

    @property
    def library(self) -> NativeLibrary:
        """The kernels."""
        return self._library

    @property
    def has_quantized_weights(self) -> bool:
        """Whether the linear layers are quantised integers."""
        return self.bits in (QUANTIZED_BITS, PACKED)

    @torch.inference_mode()
    def __call__(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[tuple[int, int, int]],
        logit_rows: Sequence[int] | None,
        tap: StateTap | None = None,
        tree: NDArray[np.void] | None = None,
    ) -> Tensor | None:
        """Compute packed tokens and write their keys and values.

        Args:
            cache: this model's cache.
            tokens: ``[tokens]`` token ids, segment after segment.
            segments: cache slot, start and number of tokens of each request.
            logit_rows: indices of the packed tokens whose logits are returned; ``None`` for no
                logits.
            tap: collects hidden states of all tokens; ``None`` for none.
            tree: ``[tokens]`` of ``TREE_TOKEN``; ``None`` if no segment is part of a token tree.

        Returns:
            Logits ``[len(logit_rows), vocab]`` float32, or ``None`` if none are requested.

        Raises:
            IndexError: a token id is outside the vocabulary.
            ValueError: a token is outside the cache, or the tokens do not match the segments.
        """
        ids, where = self.checked(cache, tokens, segments)
        wanted = np.asarray(() if logit_rows is None else logit_rows, dtype=np.int64)
        copies = None
        if len(wanted) > len(ids):
            # Drafted tokens that have no counterpart here share a row. The kernel has memory for
            # one row of each token.
            wanted, copies = np.unique(wanted, return_inverse=True)
        logits = self.logits_memory(len(wanted))
        call = self.prepare(cache, ids, where, wanted, logits)
        if tap is not None:
            layers = np.asarray(tap.layers, dtype=np.int64)
            tap.rows = torch.empty(len(ids), len(layers) * self.hidden_size, dtype=self.dtype)
            call.tapped_layers, call.tapped = layers.ctypes.data, tap.rows.data_ptr()
            call.num_tapped = len(layers)
        if tree is not None:
            call.tree = tree.ctypes.data
        self._library.decode(ctypes.byref(call))
        if copies is not None:
            return logits[torch.from_numpy(copies)]
        return None if logit_rows is None else logits

    def checked(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[tuple[int, int, int]],
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
        """Token ids and segments as the kernels read them; see :meth:`__call__`.

        Raises:
            IndexError: a token id is outside the vocabulary.
            ValueError: a token is outside the cache, or the tokens do not match the segments.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_embeddings):
            raise IndexError(f"a token is outside the vocabulary of {self.num_embeddings}")
        where = checked_segments(cache, segments)
        if where[:, 2].sum() != len(ids):
            raise ValueError(f"{len(ids)} tokens do not make up the segments")
        return ids, where

    def logits_memory(self, num_rows: int) -> Tensor:
        """Uninitialised memory for logits, ``[num_rows, vocab]`` float32."""
        return self._logits.floats(num_rows, self.vocab_size)

    def draft(self, call: ctypes.Structure) -> None:
        """Run a ``DraftCall``; see :mod:`draftwise.kernels.native.drafting`."""
        self._library.draft(ctypes.byref(call))

    def prepare(
        self,
        cache: KVCache,
        ids: np.ndarray[Any, np.dtype[np.int64]],
        segments: np.ndarray[Any, np.dtype[np.int64]],
        logit_tokens: np.ndarray[Any, np.dtype[np.int64]],
        logits: Tensor,
    ) -> DecoderCall:
        """Prepare the arguments of the kernel. All arrays must exist until the kernel has run.

        Args:
            cache: this model's cache.
            ids: ``[tokens]`` token ids.
            segments: ``[segments, 4]`` cache slot, start, number of tokens and index of the first
                packed token.
            logit_tokens: ``[logits]`` indices of the packed tokens whose logits are computed.
            logits: ``[logits, vocab]`` float32 memory that the kernel writes the logits to.
        """
        assert len(logit_tokens) <= len(ids)
        threads = self._library.threads()
        largest = int(segments[:, 2].max())
        call = DecoderCall(
            ctypes.addressof(self._model),
            ctypes.addressof(self._plan(cache)),
            ctypes.addressof(threads),
            ids.ctypes.data,
            segments.ctypes.data,
            logit_tokens.ctypes.data,
            logits.data_ptr(),
            self._memory_for(len(ids), largest, threads.count),
            len(ids),
            len(segments),
            len(logit_tokens),
            largest,
        )
        call.keep_alive = threads, self._scratch.array
        return call

    def _plan(self, cache: KVCache) -> DecoderCache:
        """The structure of a cache, created once."""
        found = self._caches.get(cache)
        if found is None:
            count = self._model.num_layers
            which = range(self._first_layer, self._first_layer + count)
            pairs = [cache.token_slots(index) for index in which]
            shapes = [cache.layers[index] for index in which]
            tables = self._angles(cache.capacity)
            arrays = (
                *(_addresses([pair[side] for pair in pairs]) for side in (0, 1)),
                (ctypes.c_int64 * count)(*(cache.sizes[index] for index in which)),
                (ctypes.c_int64 * count)(*(each.window or 0 for each in shapes)),
                (ctypes.c_int64 * count)(*(each.chunk or 0 for each in shapes)),
                *(_addresses([table[side] for table in tables]) for side in (0, 1)),
            )
            plan = DecoderCache(*(ctypes.addressof(array) for array in arrays))
            states = None
            if cache.recurrent is not None:
                states = recurrent_memory(cache.recurrent, self._recurrences)
                plan.recurrent, plan.rows = (ctypes.addressof(each) for each in states)
            found = self._caches[cache] = plan, (arrays, states)
        return found[0]

    def _angles(self, capacity: int) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of all positions of a cache, for each rotary embedding.

        Returns:
            Pairs ``[capacity, size / 2]`` float32.
        """
        if capacity not in self._tables:
            positions = torch.arange(capacity)
            self._tables[capacity] = [table(positions) for table in self._rotary]
        return self._tables[capacity]

    def _memory_for(self, num_tokens: int, largest_segment: int, num_threads: int) -> int:
        """Address of the scratch memory that a pass needs, aligned to a cache line."""
        key = num_tokens, largest_segment, num_threads
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = self._library.decoder_memory(ctypes.byref(self._model), *key)
        return self._scratch.address(size)


def checked_segments(
    cache: KVCache, segments: Sequence[tuple[int, int, int]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Convert segments to an array and check that they are inside a cache.

    Args:
        cache: the model's cache.
        segments: cache slot, start and number of tokens of each request.

    Returns:
        ``[segments, 4]`` cache slot, start, number of tokens and index of the first packed token.

    Raises:
        ValueError: a token is outside the cache, or a recurrent state is not at its position.
    """
    where = np.zeros((len(segments), 4), dtype=np.int64)
    where[:, :3] = segments
    cache_slot, start, count, first = where.T
    np.cumsum(count[:-1], out=first[1:])
    ends = start + count
    if (
        cache_slot.min() < 0
        or cache_slot.max() >= cache.num_cache_slots
        or start.min() < 0
        or count.min() < 1
        or ends.max() > cache.capacity
    ):
        raise ValueError("tokens have no place in the cache")
    if cache.recurrent is not None:
        cache.recurrent.check(segments)
    return where


def _quantized(layers: Sequence[nn.Linear]) -> list[QuantizedMatrix]:
    """The matrices of layers that all have one."""
    matrices = [quantized_matrix(layer) for layer in layers]
    known = [each for each in matrices if each is not None]
    assert len(known) == len(layers)
    return known


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """An array of the addresses of tensors."""
    return (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))


def release_weight(layer: nn.Linear) -> None:
    """Replace a layer's weight by a meta tensor."""
    layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"))
    forget_stored(layer)
