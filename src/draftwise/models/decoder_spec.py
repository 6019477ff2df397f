"""Decoder-only models as data: what Draftwise's own forward passes read of Hugging Face's modules.

A :class:`DecoderSpec` describes models that differ from Llama in norms, activation, rotary
embedding, biases, gates, experts, recurrences and constant factors; see
:mod:`draftwise.models.decoder_families`. :class:`draftwise.kernels.native.decoder.NativeDecoder`
computes any model that has one, and :class:`draftwise.models.decoder.DecoderForward` any such model
without gates, experts and recurrences. Windows of attention are not part of it: they belong to
:class:`draftwise.models.kv_cache.LayerShape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.rotary import depends_on_length, rotary_settings
from draftwise.models.experts_spec import ExpertsSpec
from draftwise.models.recurrence_spec import RecurrenceSpec


class Activation(StrEnum):
    """The activation of the gate of a feed-forward block."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"


_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}


def activation_named(name: str) -> Activation | None:
    """The activation with a name of a configuration; ``None`` if it is not supported."""
    return _ACTIVATIONS.get(name)


@dataclass(frozen=True)
class NormSpec:
    """Root mean square normalisation (Zhang and Sennrich 2019), equation 4.

    Attributes:
        weight: ``[size]`` float32 factor of each normalised number.
        epsilon: added to the mean square.
    """

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        qkv: linear layers that together compute queries, keys and values, in this order; or what a
            recurrence reads, in the order of ``RecurrentKind`` of ``recurrent_layer.h``.
        out: the linear layer of the output of attention or recurrence.
        gate_up: linear layers that together compute gate and up projection, in this order; empty if
            the layer has only experts.
        down: the linear layer of the feed-forward block's output; ``None`` if the layer has only
            experts.
        attention_norm: norm of the input of attention or recurrence; ``None`` for none.
        attention_out_norm: norm of their output before it is added; ``None`` for none.
        mlp_norm: norm of the feed-forward block's input; ``None`` for none.
        mlp_out_norm: norm of its output before it is added; ``None`` for none.
        q_norm: norm of the queries before they are rotated; ``None`` for none. A weight of the size
            of one head normalises each head, a larger one all heads together.
        k_norm: the same for the keys.
        rotary: key of the layer's rotary embedding in :attr:`DecoderSpec.rotary`; ``None`` if the
            layer does not rotate.
        experts: experts of which each token chooses some. Their output is added to that of the
            feed-forward block, if the layer has both. ``None`` for none.
        sinks: ``[heads]`` float32 scores of attention sinks; ``None`` for none.
        recurrence: what the layer computes in place of attention; ``None`` for attention.
    """

    qkv: tuple[nn.Linear, ...]
    out: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear | None
    attention_norm: NormSpec | None
    attention_out_norm: NormSpec | None
    mlp_norm: NormSpec | None
    mlp_out_norm: NormSpec | None
    q_norm: NormSpec | None
    k_norm: NormSpec | None
    rotary: str | None
    experts: ExpertsSpec | None = None
    sinks: Tensor | None = None
    recurrence: RecurrenceSpec | None = None

    @property
    def linear_layers(self) -> tuple[nn.Linear, ...]:
        """All linear layers."""
        down = () if self.down is None else (self.down,)
        return (*self.qkv, self.out, *self.gate_up, *down)

    @property
    def intermediate_size(self) -> int:
        """Size of the gate of the feed-forward block; 0 if the layer has only experts."""
        return sum(each.out_features for each in self.gate_up) // 2


class RotaryTable:
    """Cosines and sines of a rotary embedding (Su et al. 2021), halves layout.

    Attributes:
        size: leading numbers of a head that are rotated.
    """

    def __init__(self, module: nn.Module, layer_type: str | None) -> None:
        """Wrap a module that computes the embedding of positions.

        Args:
            module: a Hugging Face rotary embedding.
            layer_type: the type of layers that it is computed for, if the module has several.
        """
        self._module = module
        self._arguments = () if layer_type is None else (layer_type,)
        cos, _ = self._call(torch.zeros(1, 1, dtype=torch.long, device=_device(module)))
        frequencies = getattr(module, "inv_freq", None)
        # Modules return the angles of all rotated numbers, or like gpt-oss of each pair.
        of_pairs = isinstance(frequencies, Tensor) and len(frequencies) == cos.shape[-1]
        self.size = cos.shape[-1] * (2 if of_pairs else 1)

    @property
    def is_dynamic(self) -> bool:
        """Whether the angles of a pass depend on its last position, which is read on the host."""
        config: Any = self._module.config
        return any(depends_on_length(each) for each in rotary_settings(config.rope_parameters))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[tokens, size / 2]`` float32 of positions ``[tokens]``."""
        cos, sin = self._call(positions.unsqueeze(0))
        half = self.size // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _call(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.zeros(1, dtype=torch.float32, device=positions.device)
        cos, sin = self._module(dtype, positions, *self._arguments)
        return cos, sin


@dataclass(frozen=True)
class StateInputSpec:
    """How a drafting head reads states of a target.

    The first layer reads the normalised embedding and the normalised state side by side; see
    :class:`draftwise.models.heads.forward.HeadForward`. Or the projection reads both; see
    :class:`draftwise.models.heads.mtp_forward.MtpForward`. Or the normalised states are rows of a
    context; see :class:`draftwise.models.heads.block_forward.BlockForward`.

    Attributes:
        projection: the linear layer from the target's states to the head's residual stream.
        joint_norm: norm of all states together before they are projected; ``None`` for none.
        norms: norm of each state before it is projected; empty for none.
        state_norm: norm of the projected state, or of the state that is projected with the token.
        norm_before_residual: whether the residual stream begins with the normalised state.
        norm_output: whether the next token of a draft reads the output after the final norm.
        is_context: whether the states are rows of a context, which have keys and values in every
            layer and nothing else.
        embedding_norm: norm of the embedded token, which the projection reads before the state;
            ``None`` if it reads states only.
    """

    projection: nn.Linear
    joint_norm: NormSpec | None
    norms: tuple[NormSpec, ...]
    state_norm: NormSpec
    norm_before_residual: bool
    norm_output: bool
    is_context: bool = False
    embedding_norm: NormSpec | None = None

    @property
    def state_size(self) -> int:
        """Size of a token's states side by side."""
        of_token = 0 if self.embedding_norm is None else self.projection.out_features
        return self.projection.in_features - of_token


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only model.

    Attributes:
        embedding: the token embedding.
        embedding_scale: factor of the embedding.
        layers: the decoder layers.
        norm: the norm before the head.
        head: the linear layer that computes the logits; ``None`` for a drafting head without its
            own.
        logit_scale: factor of the logits.
        logit_softcap: the logits are limited to ±softcap by softcap·tanh(logit / softcap); ``None``
            for no limit.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_size: size of a head.
        hidden_size: size of the residual stream.
        activation: activation of the gate.
        scaling: factor of the attention scores.
        softcap: limit of the attention scores, as ``logit_softcap``; ``None`` for no limit.
        residual_scale: factor of a block's output before it is added.
        rotary: rotary embeddings by key.
        state_input: how a drafting head reads states of a target; ``None`` for other models.
        has_gates: whether each query is followed by a gate, whose sigmoid is a factor of the head's
            output.
    """

    embedding: nn.Embedding
    embedding_scale: float
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    head: nn.Linear | None
    logit_scale: float
    logit_softcap: float | None
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    activation: Activation
    scaling: float
    softcap: float | None
    residual_scale: float
    rotary: dict[str, RotaryTable]
    state_input: StateInputSpec | None = None
    has_gates: bool = False

    @property
    def experts(self) -> list[ExpertsSpec]:
        """The experts of all layers that have some."""
        return [layer.experts for layer in self.layers if layer.experts is not None]

    @property
    def recurrences(self) -> list[RecurrenceSpec]:
        """The recurrences of all layers that have one."""
        return [layer.recurrence for layer in self.layers if layer.recurrence is not None]


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.buffers(), *module.parameters()]
    return tensors[0].device if tensors else torch.device("cpu")
