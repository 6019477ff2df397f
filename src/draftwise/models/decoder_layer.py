"""One decoder layer in PyTorch operations, as its description defines it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.attention import attend
from draftwise.models.attention_scores import Scores
from draftwise.models.blocked_linear import Linear, join_linear
from draftwise.models.decoder_spec import Activation, LayerSpec
from draftwise.models.norm import Norm
from draftwise.models.packing import PackedBatch

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU: F.gelu,
}


class LayerSettings(Protocol):
    """What all layers of a model share; see :class:`draftwise.models.decoder_spec.DecoderSpec`."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads."""

    @property
    def head_size(self) -> int:
        """Size of a head."""

    @property
    def activation(self) -> Activation:
        """Activation of the gate."""

    @property
    def scaling(self) -> float:
        """Factor of the attention scores."""

    @property
    def softcap(self) -> float | None:
        """Limit of the attention scores; ``None`` for no limit."""

    @property
    def residual_scale(self) -> float:
        """Factor of a block's output before it is added."""


class DecoderLayer:
    """Attention and gated feed-forward block, each added to the residual stream.

    Attributes:
        rotary: see :class:`LayerSpec`.
        scores: how attention scores are computed.
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm, q_norm, k_norm: see
            :class:`LayerSpec`.
        qkv, out, gate_up, down: linear layers, those with the same input merged.
    """

    def __init__(self, spec: LayerSettings, layer: LayerSpec, dtype: torch.dtype) -> None:
        """Take over a layer. Its own linear layers lose their weights."""
        self.rotary = layer.rotary
        self.scores = Scores(spec.scaling, spec.softcap)
        self.attention_norm = Norm.of(layer.attention_norm, dtype)
        self.attention_out_norm = Norm.of(layer.attention_out_norm, dtype)
        self.mlp_norm = Norm.of(layer.mlp_norm, dtype)
        self.mlp_out_norm = Norm.of(layer.mlp_out_norm, dtype)
        self.q_norm, self.k_norm = Norm.of(layer.q_norm, dtype), Norm.of(layer.k_norm, dtype)
        self.qkv: Linear = join_linear(list(layer.qkv))
        self.out: Linear = join_linear([layer.out])
        self.gate_up: Linear = join_linear(list(layer.gate_up))
        assert layer.down is not None
        self.down: Linear = join_linear([layer.down])
        self._spec, self._intermediate = spec, layer.intermediate_size
        self._activation = _ACTIVATIONS[spec.activation]

    def __call__(
        self,
        index: int,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        packed: PackedBatch,
    ) -> Tensor:
        """Compute the layer.

        Args:
            index: the layer's index.
            hidden: residual stream ``[tokens, hidden]``, perhaps with padding rows at its end.
            angles: cosines and sines ``[tokens, 1, rotated / 2]``; ``None`` for no rotation.
            packed: plan of this forward pass.

        Returns:
            The residual stream after the layer.
        """
        normed = hidden if self.attention_norm is None else self.attention_norm(hidden)
        return self.after_norm(index, normed, hidden, angles, packed)

    def after_norm(
        self,
        index: int,
        normed: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        packed: PackedBatch,
    ) -> Tensor:
        """Compute the layer after the norm of the attention's input.

        Args:
            index: the layer's index.
            normed: ``[tokens, input]`` what queries, keys and values are computed from.
            hidden: residual stream ``[tokens, hidden]``.
            angles, packed: as in :meth:`__call__`.

        Returns:
            The residual stream after the layer.
        """
        spec, tokens = self._spec, len(hidden)
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = self.qkv(normed).view(tokens, -1, spec.head_size)
        qk = qkv[:, : heads + kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.of_heads(qk[:, :heads]), self.k_norm.of_heads(qk[:, heads:])
            qk = torch.cat((q, k), dim=1)
        if angles is not None:
            qk = rotate(qk, *angles)
        real = len(packed.positions)
        out = attend(
            packed,
            index,
            qk[:real, :heads],
            qk[:real, heads:],
            qkv[:real, heads + kv_heads :],
            self.scores,
        ).view(real, -1)
        if real < tokens:
            out = F.pad(out, (0, 0, 0, tokens - real))
        return self.feed_forward(self._add(hidden, self.out(out), self.attention_out_norm))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer after the attention.

        Args:
            hidden: residual stream ``[tokens, hidden]`` after the attention.

        Returns:
            The residual stream after the layer.
        """
        normed = hidden if self.mlp_norm is None else self.mlp_norm(hidden)
        return self._add(hidden, self.mlp(normed), self.mlp_out_norm)

    def mlp(self, normed: Tensor) -> Tensor:
        """The feed-forward block of ``[tokens, hidden]``."""
        gate_up, size = self.gate_up(normed), self._intermediate
        return self.down(self._activation(gate_up[:, :size]) * gate_up[:, size:])

    def _add(self, hidden: Tensor, out: Tensor, norm: Norm | None) -> Tensor:
        """Add the output of a block to the residual stream."""
        if norm is not None:
            out = norm(out)
        if self._spec.residual_scale != 1:
            out = out * self._spec.residual_scale
        return hidden + out


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of ``[tokens, heads, head]``.

    Each number is paired with the one half of the rotated part further. The numbers after the
    rotated part stay as they are.

    Args:
        heads: ``[tokens, heads, head]``.
        cos, sin: ``[tokens, 1, rotated / 2]``.
    """
    half = cos.shape[-1]
    first, second, rest = heads.tensor_split((half, 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
