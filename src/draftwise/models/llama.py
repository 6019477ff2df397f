"""The forward pass of Llama and models with the same layers, without Hugging Face's modules.

With few tokens, a step of a small model is mostly overhead of calls between modules. This forward
pass has no modules and merges projections with the same input. A step of a two-layer draft takes
about half the time. As for every model, the logits are compared with Hugging Face's at load.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.models.attention import PackedBatch, attend
from draftwise.models.kv_cache import KVCache
from draftwise.models.packing import Linear, PackedLinear, join_linear, padded_rows
from draftwise.models.transfer import upload

# Models whose layers are those of Llama, except for biases of the projections.
LLAMA_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})


def is_llama(model: nn.Module) -> bool:
    """Whether :class:`LlamaForward` supports this model."""
    return type(model).__name__ in LLAMA_ARCHITECTURES


class LlamaForward:
    """Embedding, decoder layers, final norm and head on packed tokens."""

    def __init__(self, model: nn.Module) -> None:
        """Pack the weights of a model. Its own linear layers lose their weights."""
        causal: Any = model
        decoder = causal.model
        self._embedding: nn.Embedding = decoder.embed_tokens
        self._rotary: nn.Module = decoder.rotary_emb
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self._norm = _Norm(decoder.norm)
        self._head = join_linear([causal.lm_head])
        self._pads = isinstance(self._head, PackedLinear)
        self._is_fused = _has_kernels(decoder)
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
        hidden: Tensor = self._embedding(ids)  # [tokens, hidden]
        if self._is_fused and packed.ragged is not None:
            return self._fused(hidden, packed)
        cos, sin = self._rotary(hidden, positions.unsqueeze(0))  # [1, tokens, head]
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)  # one row for all heads of a token
        for index, layer in enumerate(self._layers):
            hidden = layer(index, hidden, cos, sin, packed)
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
            positions = torch.arange(capacity, device=hidden.device).unsqueeze(0)
            cos, sin = self._rotary(hidden, positions)
            self._tables[capacity] = cos[0].contiguous(), sin[0].contiguous()
        return self._tables[capacity]

    def compile(self, cache: KVCache) -> None:
        """Compile the kernels that steps may need."""
        if self._is_fused:
            from draftwise.models.attention_kernel import compile_for

            compile_for(self._layers[0].num_heads, cache.token_slots(0)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[tokens, vocab]`` of hidden states ``[tokens, hidden]``."""
        return self._head(self._norm(hidden))


class _Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019), equation 4."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight
        self._epsilon: float = norm.variance_epsilon
        self._shape = tuple(norm.weight.shape)

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self._shape, self._weight, self._epsilon)

    def after_adding(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of both and its normalised form, in one kernel."""
        from draftwise.models.kernels import add_norm

        return add_norm(hidden, delta, self._weight, self._epsilon)


class _Layer:
    """One decoder layer: attention and gated feed-forward, each on the normalised residual."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._head_size: int = attention.head_dim
        self._num_kv_heads = attention.k_proj.out_features // self._head_size
        self.num_heads = attention.q_proj.out_features // self._head_size
        self._scaling: float = attention.scaling
        self._intermediate_size: int = mlp.gate_proj.out_features
        self._activation: nn.Module = mlp.act_fn
        self._attention_norm = _Norm(layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)
        self._qkv: Linear = join_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out: Linear = join_linear([attention.o_proj])
        self._gate_up: Linear = join_linear([mlp.gate_proj, mlp.up_proj])
        self._down: Linear = join_linear([mlp.down_proj])

    def __call__(
        self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, packed: PackedBatch
    ) -> Tensor:
        tokens, heads, kv_heads = len(hidden), self.num_heads, self._num_kv_heads
        qkv = self._qkv(self._attention_norm(hidden)).view(tokens, -1, self._head_size)
        rotated = _rotate(qkv[:, : heads + kv_heads], cos, sin)
        real = len(packed.positions)
        out = attend(
            packed,
            index,
            rotated[:real, :heads],
            rotated[:real, heads:],
            qkv[:real, heads + kv_heads :],
            self._scaling,
        ).view(real, -1)
        if real < tokens:
            out = F.pad(out, (0, 0, 0, tokens - real))
        hidden = hidden + self._out(out)
        gate_up = self._gate_up(self._mlp_norm(hidden))
        gate = self._activation(gate_up[:, : self._intermediate_size])
        return hidden + self._down(gate * gate_up[:, self._intermediate_size :])

    def fused(
        self,
        index: int,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        packed: PackedBatch,
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer with fused kernels, for CUDA.

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
        hidden, normed = self._attention_norm.after_adding(hidden, delta)
        q = rotate_and_store(
            self._qkv(normed),
            cos,
            sin,
            packed.token_slots,
            *packed.cache.token_slots(index),
            self.num_heads,
        )
        out = packed.ragged.attend(packed.cache, index, q, self._scaling)
        hidden, normed = self._mlp_norm.after_adding(hidden, self._out(out.view(len(q), -1)))
        return hidden, self._down(gated(self._gate_up(normed)))


def _has_kernels(decoder: Any) -> bool:
    """Whether :mod:`draftwise.models.kernels` supports a model's layers on its device."""
    return (
        decoder.embed_tokens.weight.device.type == "cuda"
        and decoder.config.hidden_act == "silu"
        and decoder.layers[0].self_attn.head_dim % 2 == 0
        and importlib.util.find_spec("triton") is not None
    )


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of ``[tokens, heads, head]``.

    Each number is paired with the one half a head further.
    """
    half = heads.shape[-1] // 2
    rotated = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cos + rotated * sin
