"""The forward pass of decoder-only models in PyTorch operations, without Hugging Face's modules.

With few tokens, a small model's step is mostly overhead of calls between modules. Here they are
left out and projections with the same input are merged. A step of a two-layer draft then takes
about half the time. As for every model, the logits are compared with Hugging Face's at load.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.attention import PackedBatch, attend
from draftwise.models.attention_scores import Scores
from draftwise.models.decoder_spec import Activation, DecoderSpec, LayerSpec, NormSpec
from draftwise.models.kv_cache import KVCache
from draftwise.models.packing import Linear, PackedLinear, join_linear, padded_rows
from draftwise.models.transfer import upload

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.GELU: F.gelu,
}


class DecoderForward:
    """Embedding, decoder layers, final norm and head on packed tokens."""

    def __init__(self, spec: DecoderSpec) -> None:
        """Take over a model. Its own linear layers lose their weights."""
        self._spec = spec
        weight = spec.embedding.weight
        self._layers = [_Layer(spec, layer, weight.dtype) for layer in spec.layers]
        self._norm = _Norm(spec.norm, weight.dtype)
        self._head = join_linear([spec.head])
        self._pads = isinstance(self._head, PackedLinear)
        self._is_fused = _has_kernels(spec)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, ids: Tensor, packed: PackedBatch, logit_rows: Sequence[int] | None
    ) -> Tensor | None:
        """See :class:`draftwise.models.forward.ForwardPass`."""
        hidden = self.hidden(ids, packed)
        if logit_rows is None:
            return None
        return self.logits(hidden[upload(logit_rows, torch.long, ids.device)])

    def hidden(self, ids: Tensor, packed: PackedBatch) -> Tensor:
        """Hidden states of packed token ids ``[tokens]``, before the final norm.

        Returns:
            ``[tokens, hidden]``, followed by padding rows that must not be used.
        """
        positions = packed.positions
        if self._pads:
            # Padded once here instead of in every linear layer. These rows are never read.
            missing = padded_rows(len(ids)) - len(ids)
            ids, positions = F.pad(ids, (0, missing)), F.pad(positions, (0, missing))
        hidden: Tensor = F.embedding(ids, self._spec.embedding.weight)  # [tokens, hidden]
        if self._spec.embedding_scale != 1:
            hidden = hidden * self._spec.embedding_scale
        if self._is_fused and packed.ragged is not None:
            return self._fused(hidden, packed)
        angles: dict[str | None, tuple[Tensor, Tensor] | None] = {None: None}
        for key, table in self._spec.rotary.items():
            cos, sin = table(positions)
            # One row for all heads of a token.
            angles[key] = cos.to(hidden.dtype).unsqueeze(1), sin.to(hidden.dtype).unsqueeze(1)
        for index, layer in enumerate(self._layers):
            hidden = layer(index, hidden, angles[layer.rotary], packed)
        return hidden

    def _fused(self, hidden: Tensor, packed: PackedBatch) -> Tensor:
        cos, sin = (each[packed.positions] for each in self._angles(packed.cache.capacity, hidden))
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            hidden, delta = layer.fused(index, hidden, delta, cos, sin, packed)
        return hidden if delta is None else hidden + delta

    def _angles(self, capacity: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``[capacity, head]`` cosines and sines of all positions of a cache, computed once.

        They are never freed, as captured CUDA graphs read them.
        """
        if capacity not in self._tables:
            positions = torch.arange(capacity, device=hidden.device)
            (table,) = set(self._spec.rotary.values())
            cos, sin = (each.to(hidden.dtype).repeat(1, 2) for each in table(positions))
            self._tables[capacity] = cos.contiguous(), sin.contiguous()
        return self._tables[capacity]

    def compile(self, cache: KVCache) -> None:
        """Compile the kernels that steps may need."""
        if self._is_fused:
            from draftwise.models.attention_kernel import compile_for

            compile_for(self._spec.num_heads, cache.token_slots(0)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[tokens, vocab]`` of hidden states ``[tokens, hidden]``."""
        logits = self._head(self._norm(hidden))
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        if self._spec.logit_softcap is not None:
            logits = self._spec.logit_softcap * torch.tanh(logits / self._spec.logit_softcap)
        return logits


class _Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019), equation 4."""

    def __init__(self, spec: NormSpec, dtype: torch.dtype) -> None:
        self._epsilon = spec.epsilon
        rounded = spec.weight.to(dtype)
        # A factor 1 + weight needs more digits than short types have.
        self._is_exact = torch.equal(rounded.float(), spec.weight)
        self.weight = rounded if self._is_exact else spec.weight
        self._shape = tuple(spec.weight.shape)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalise ``[..., size]``."""
        if self._is_exact:
            return F.rms_norm(hidden, self._shape, self.weight, self._epsilon)
        normalised = F.rms_norm(hidden.float(), self._shape, self.weight, self._epsilon)
        return normalised.to(hidden.dtype)

    def of_heads(self, heads: Tensor) -> Tensor:
        """Normalise ``[tokens, heads, head]``: each head, or all heads of a token together."""
        if heads.shape[-1] == self._shape[0]:
            return self(heads)
        return self(heads.flatten(1)).view(heads.shape)

    def after_adding(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of both and its normalised form, in one kernel."""
        from draftwise.models.kernels import add_norm

        return add_norm(hidden, delta, self.weight, self._epsilon)


class _Layer:
    """One decoder layer: attention and gated feed-forward, each added to the residual stream."""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, dtype: torch.dtype) -> None:
        def norm(found: NormSpec | None) -> _Norm | None:
            return None if found is None else _Norm(found, dtype)

        self.rotary = layer.rotary
        self._head_size, self._num_kv_heads = spec.head_size, spec.num_kv_heads
        self._num_heads = spec.num_heads
        self._scores = Scores(spec.scaling, spec.softcap)
        self._residual_scale = spec.residual_scale
        self._intermediate_size = spec.intermediate_size
        self._activation = _ACTIVATIONS[spec.activation]
        self._attention_norm, self._mlp_norm = norm(layer.attention_norm), norm(layer.mlp_norm)
        self._attention_out_norm = norm(layer.attention_out_norm)
        self._mlp_out_norm = norm(layer.mlp_out_norm)
        self._q_norm, self._k_norm = norm(layer.q_norm), norm(layer.k_norm)
        self._qkv: Linear = join_linear(list(layer.qkv))
        self._out: Linear = join_linear([layer.out])
        self._gate_up: Linear = join_linear(list(layer.gate_up))
        self._down: Linear = join_linear([layer.down])

    def __call__(
        self,
        index: int,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        packed: PackedBatch,
    ) -> Tensor:
        tokens, heads, kv_heads = len(hidden), self._num_heads, self._num_kv_heads
        normed = hidden if self._attention_norm is None else self._attention_norm(hidden)
        qkv = self._qkv(normed).view(tokens, -1, self._head_size)
        qk = qkv[:, : heads + kv_heads]
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm.of_heads(qk[:, :heads]), self._k_norm.of_heads(qk[:, heads:])
            qk = torch.cat((q, k), dim=1)
        if angles is not None:
            qk = _rotate(qk, *angles)
        real = len(packed.positions)
        out = attend(
            packed,
            index,
            qk[:real, :heads],
            qk[:real, heads:],
            qkv[:real, heads + kv_heads :],
            self._scores,
        ).view(real, -1)
        if real < tokens:
            out = F.pad(out, (0, 0, 0, tokens - real))
        hidden = self._add(hidden, self._out(out), self._attention_out_norm)
        normed = hidden if self._mlp_norm is None else self._mlp_norm(hidden)
        gate_up = self._gate_up(normed)
        gate = self._activation(gate_up[:, : self._intermediate_size])
        out = self._down(gate * gate_up[:, self._intermediate_size :])
        return self._add(hidden, out, self._mlp_out_norm)

    def _add(self, hidden: Tensor, out: Tensor, norm: _Norm | None) -> Tensor:
        """Add the output of a block to the residual stream."""
        if norm is not None:
            out = norm(out)
        if self._residual_scale != 1:
            out = out * self._residual_scale
        return hidden + out

    def fused(
        self,
        index: int,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        packed: PackedBatch,
    ) -> tuple[Tensor, Tensor]:
        """Compute a layer of Llama's kind with fused kernels, for CUDA.

        Args:
            index: the layer's index.
            hidden: residual stream ``[tokens, hidden]``.
            delta: output ``[tokens, hidden]`` of the previous block, not yet added; ``None`` for
                none.
            cos, sin: ``[tokens, head]``.
            packed: plan of this forward pass, with ragged attention.

        Returns:
            The residual stream, and this layer's last output, not yet added to it.
        """
        from draftwise.models.kernels import gated, rotate_and_store

        assert packed.ragged is not None
        assert self._attention_norm is not None
        assert self._mlp_norm is not None
        hidden, normed = self._attention_norm.after_adding(hidden, delta)
        q = rotate_and_store(
            self._qkv(normed),
            cos,
            sin,
            packed.token_slots,
            *packed.cache.token_slots(index),
            self._num_heads,
        )
        out = packed.ragged.attend(packed.cache, index, q, self._scores.scaling)
        hidden, normed = self._mlp_norm.after_adding(hidden, self._out(out.view(len(q), -1)))
        return hidden, self._down(gated(self._gate_up(normed)))


def _has_kernels(spec: DecoderSpec) -> bool:
    """Whether :mod:`draftwise.models.kernels` supports a model's layers on its device."""
    return (
        spec.embedding.weight.device.type == "cuda"
        and is_like_llama(spec)
        and spec.head_size % 2 == 0
        and importlib.util.find_spec("triton") is not None
    )


def is_like_llama(spec: DecoderSpec) -> bool:
    """Whether the layers are those of Llama, except for biases of the projections."""
    return (
        spec.activation is Activation.SILU
        and spec.residual_scale == 1
        and spec.softcap is None
        and len(set(spec.rotary.values())) == 1
        and all(
            layer.attention_norm is not None
            and layer.mlp_norm is not None
            and layer.attention_out_norm is None
            and layer.mlp_out_norm is None
            and layer.q_norm is None
            and layer.k_norm is None
            and layer.rotary is not None
            and spec.rotary[layer.rotary].size == spec.head_size
            for layer in spec.layers
        )
    )


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
