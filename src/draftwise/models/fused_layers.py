"""Decoder layers whose operations between the matrix products are Triton kernels, for CUDA.

All variants of :class:`draftwise.models.decoder_spec.LayerSpec` are computed. Only a norm of all
heads together (OLMo 2 and 3) is left to PyTorch's operations, which run before the kernel that
rotates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.triton.attention import compile_for
from draftwise.kernels.triton.layers import add_norm, gated, rotate_and_store
from draftwise.models.decoder_layer import DecoderLayer
from draftwise.models.decoder_spec import DecoderSpec
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.norm import Norm
from draftwise.models.packing import PackedBatch

# Cosines and sines ``[positions, rotated / 2]``.
Angles = tuple[Tensor, Tensor]


class FusedLayers:
    """All layers of a model, for passes with ragged attention."""

    def __init__(self, spec: DecoderSpec, layers: Sequence[DecoderLayer]) -> None:
        """Share the weights of the layers in PyTorch operations."""
        self._spec = spec
        self._layers = layers
        self._tables: dict[int, dict[str | None, Angles]] = {}

    def __call__(self, hidden: Tensor, packed: PackedBatch, tap: StateTap | None = None) -> Tensor:
        """The residual stream ``[tokens, hidden]`` after all layers.

        Args:
            hidden: ``[tokens, hidden]`` the embedded tokens.
            packed: plan of this forward pass.
            tap: collects hidden states before layers; ``None`` for none.
        """
        angles: dict[int, Angles] = {}
        residual = _Residual(hidden, self._spec.residual_scale)
        tables = self._angles(packed.cache.capacity, hidden)
        for index, layer in enumerate(self._layers):
            table = tables[layer.rotary]
            if id(table) not in angles:
                cos, sin = table
                angles[id(table)] = cos[packed.positions], sin[packed.positions]
            if tap is not None and index in tap.layers:
                tap.offer(index, residual.normed(None), len(packed.positions))
            self._layer(index, layer, residual, angles[id(table)], packed)
        result = residual.normed(None)
        if tap is not None:
            tap.offer(len(self._layers), result, len(packed.positions))
        return result

    def compile(self, cache: KVCache, trees: bool) -> None:
        """Compile the attention kernels. The others are compiled by the first pass."""
        compile_for(self._spec.num_heads, cache, self._layers[0].scores, trees)

    def _layer(
        self,
        index: int,
        layer: DecoderLayer,
        residual: _Residual,
        angles: Angles,
        packed: PackedBatch,
    ) -> None:
        spec = self._spec
        assert packed.ragged is not None
        qkv = layer.qkv(residual.normed(layer.attention_norm))
        norms = layer.q_norm, layer.k_norm
        if layer.q_norm is not None and len(layer.q_norm.weight) != spec.head_size:
            self._norm_all_heads(qkv, layer)
            norms = None, None
        q = rotate_and_store(
            qkv,
            *angles,
            *norms,
            packed.slots(index),
            *packed.cache.token_slots(index),
            spec.num_heads,
        )
        out = packed.ragged.attend(packed.cache, index, q, layer.scores)
        residual.add(layer.out(out.view(len(q), -1)), layer.attention_out_norm)
        gate_up = layer.gate_up(residual.normed(layer.mlp_norm))
        residual.add(layer.down(gated(gate_up, spec.activation)), layer.mlp_out_norm)

    def _norm_all_heads(self, qkv: Tensor, layer: DecoderLayer) -> None:
        """Normalise queries and keys in place."""
        q_size, kv_size = (
            self._spec.head_size * count
            for count in (self._spec.num_heads, self._spec.num_kv_heads)
        )
        for part, norm in (
            (qkv[:, :q_size], layer.q_norm),
            (qkv[:, q_size : q_size + kv_size], layer.k_norm),
        ):
            assert norm is not None
            part.copy_(norm(part))

    def _angles(self, capacity: int, hidden: Tensor) -> dict[str | None, Angles]:
        """Cosines and sines of all positions of a cache by key of the embedding, computed once.

        They are never freed, as captured CUDA graphs read them. Layers that do not rotate get
        angles of zero, so that one kernel serves all.
        """
        if capacity not in self._tables:
            positions = torch.arange(capacity, device=hidden.device)
            half = capacity, self._spec.head_size // 2
            by_table = {
                table: tuple(each.to(hidden.dtype) for each in table(positions))
                for table in set(self._spec.rotary.values())
            }
            tables: dict[str | None, Angles] = {
                key: by_table[table]  # type: ignore[misc]
                for key, table in self._spec.rotary.items()
            }
            if any(layer.rotary is None for layer in self._layers):
                tables[None] = hidden.new_ones(half), hidden.new_zeros(half)
            self._tables[capacity] = tables
        return self._tables[capacity]


class _Residual:
    """The residual stream. A block's output is added by the kernel that normalises the sum."""

    def __init__(self, hidden: Tensor, scale: float) -> None:
        self._hidden = hidden
        self._scale = scale
        self._delta: Tensor | None = None
        self._delta_norm: Norm | None = None

    def add(self, delta: Tensor, norm: Norm | None) -> None:
        """Note a block's output and the norm of it. It is added by the next :meth:`normed`."""
        self._delta, self._delta_norm = delta, norm

    def normed(self, norm: Norm | None) -> Tensor:
        """The stream, normalised if there is a norm."""
        self._hidden, normed = add_norm(
            self._hidden, self._delta, self._delta_norm, norm, self._scale
        )
        self._delta = None
        return normed
