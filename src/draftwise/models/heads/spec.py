"""A head as data: as a decoder whose first layer reads states of a target, or as EAGLE-1 has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwise.checkpoints.heads.config import DraftHeadConfig, HeadConfig
from draftwise.errors import UnsupportedModelError
from draftwise.models.decoder_spec import (
    Activation,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    RotaryTable,
    StateInputSpec,
    activation_named,
)
from draftwise.models.layer_shape import LayerShape

# Key of the only rotary embedding.
ROTARY = "full_attention"


@dataclass(frozen=True)
class EagleSpec:
    """A head of EAGLE-1 or EAGLE-2; see :class:`draftwise.models.heads.eagle_forward.EagleForward`.

    Attributes:
        embedding: the token embedding.
        embedding_norm: norm of the embedded tokens; ``None`` for none.
        fusion: the linear layer from the embedded token and the feature to the residual stream.
        layers: the decoder layers.
        norm: norm before the projection to the vocabulary; ``None`` for none.
        head: the projection to the vocabulary; ``None`` for the target's.
        vocab_size: the target's number of tokens.
        logit_scale: factor of the logits.
        num_heads, num_kv_heads, head_size, hidden_size, activation, scaling, softcap,
            residual_scale: see :class:`draftwise.models.decoder_spec.DecoderSpec`.
        rotary: the rotary embedding.
    """

    embedding: nn.Embedding
    embedding_norm: NormSpec | None
    fusion: nn.Linear
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    head: nn.Linear | None
    vocab_size: int
    logit_scale: float
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    activation: Activation
    scaling: float
    softcap: float | None
    residual_scale: float
    rotary: RotaryTable


def head_spec(config: HeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor) -> DecoderSpec:
    """Describe a head of EAGLE-3.

    Args:
        config: its configuration.
        tensors: its weights by the names of :class:`draftwise.models.heads.HeadWeights`, in one
            dtype and on one device.
        embedding: ``[target_vocab, hidden]`` the token embedding, its own or the target's.

    Raises:
        UnsupportedModelError: the activation is not supported.
    """
    parts = HeadParts(config, tensors)
    reads = StateInputSpec(
        parts.linear("fc"),
        parts.optional_norm("input_norm.weight"),
        tuple(parts.norm(f"fc_norm.{index}.weight") for index in range(config.num_states))
        if config.fc_norm
        else (),
        parts.norm("layers.0.hidden_norm.weight"),
        config.norm_before_residual,
        config.norm_output,
    )
    return DecoderSpec(
        embedding_of(embedding),
        1.0,
        parts.layers(),
        parts.norm("norm.weight"),
        parts.linear("lm_head"),
        config.logit_scale,
        None,
        *head_sizes(config),
        {ROTARY: RotaryTable(head_rotary(config).to(embedding.device), None)},
        reads,
    )


def eagle_spec(config: HeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor) -> EagleSpec:
    """Describe a head of EAGLE-1 or EAGLE-2; see :func:`head_spec`."""
    parts = HeadParts(config, tensors)
    return EagleSpec(
        embedding_of(embedding),
        parts.optional_norm("embedding_layernorm.weight"),
        parts.linear("fc"),
        parts.layers(),
        parts.optional_norm("norm.weight"),
        parts.linear("lm_head") if "lm_head.weight" in tensors else None,
        config.target_vocab_size,
        config.logit_scale,
        *head_sizes(config),
        RotaryTable(head_rotary(config).to(embedding.device), None),
    )


class HeadParts:
    """The parts of a head by the names of its tensors."""

    def __init__(self, config: DraftHeadConfig, tensors: Mapping[str, Tensor]) -> None:
        self._config, self._tensors = config, tensors

    def norm(self, name: str) -> NormSpec:
        """A norm."""
        return NormSpec(self._tensors[name].float(), self._config.rms_norm_eps)

    def optional_norm(self, name: str) -> NormSpec | None:
        """A norm, if the head has it."""
        return self.norm(name) if name in self._tensors else None

    def linear(self, name: str) -> nn.Linear:
        """A linear layer, with a bias if the head has it."""
        weight, bias = self._tensors[name + ".weight"], self._tensors.get(name + ".bias")
        with torch.device("meta"):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def layers(self) -> tuple[LayerSpec, ...]:
        """The decoder layers."""
        return tuple(self._layer(index) for index in range(self._config.num_layers))

    def _layer(self, index: int) -> LayerSpec:
        name, linear = f"layers.{index}.", self.linear
        attention, mlp = name + "self_attn.", name + "mlp."
        return LayerSpec(
            tuple(linear(attention + part) for part in ("q_proj", "k_proj", "v_proj")),
            linear(attention + "o_proj"),
            (linear(mlp + "gate_proj"), linear(mlp + "up_proj")),
            linear(mlp + "down_proj"),
            self.optional_norm(name + "input_layernorm.weight"),
            None,
            self.norm(name + "post_attention_layernorm.weight"),
            None,
            self.optional_norm(attention + "q_norm.weight"),
            self.optional_norm(attention + "k_norm.weight"),
            ROTARY,
        )


def embedding_of(weight: Tensor) -> nn.Embedding:
    """The module of an embedding ``[tokens, size]``."""
    with torch.device("meta"):
        embeds = nn.Embedding(*weight.shape)
    embeds.weight = nn.Parameter(weight, requires_grad=False)
    return embeds


class HeadSizes(NamedTuple):
    """What heads of all kinds share; see :class:`draftwise.models.decoder_spec.DecoderSpec`."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    activation: Activation
    scaling: float
    softcap: float | None
    residual_scale: float


def head_sizes(config: DraftHeadConfig) -> HeadSizes:
    """Sizes and factors of a head by its configuration.

    Raises:
        UnsupportedModelError: the activation is not supported.
    """
    activation = activation_named(config.activation)
    if activation is None:
        raise UnsupportedModelError("draft", f"the head's activation is {config.activation}")
    return HeadSizes(
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        config.hidden_size,
        activation,
        config.head_size**-0.5,
        None,
        1.0,
    )


def head_layers(config: HeadConfig, max_model_len: int) -> list[LayerShape]:
    """The keys and values of each layer for one token."""
    windows = [None if w is None or w >= max_model_len else w for w in config.windows]
    heads, size = config.num_kv_heads, config.head_size
    return [LayerShape(heads, size, size, window) for window in windows]


def head_rotary(config: DraftHeadConfig) -> nn.Module:
    """The rotary embedding, as a module of transformers."""
    rotary: nn.Module = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.num_heads * config.head_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
    )
    return rotary
