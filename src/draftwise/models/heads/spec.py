"""A head as a decoder whose first layer reads states of a target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftwise.errors import UnsupportedModelError
from draftwise.models.decoder_spec import (
    DecoderSpec,
    LayerSpec,
    NormSpec,
    RotaryTable,
    StateInputSpec,
    activation_named,
)
from draftwise.models.heads.config import HeadConfig
from draftwise.models.layer_shape import LayerShape

_ROTARY = "full_attention"


def head_spec(config: HeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor) -> DecoderSpec:
    """Describe a head.

    Args:
        config: its configuration.
        tensors: its weights by the names of :class:`draftwise.models.heads.HeadWeights`, in one
            dtype and on one device.
        embedding: ``[target_vocab, hidden]`` the token embedding, its own or the target's.

    Raises:
        UnsupportedModelError: the activation is not supported.
    """

    def norm(name: str) -> NormSpec:
        return NormSpec(tensors[name].float(), config.rms_norm_eps)

    def optional_norm(name: str) -> NormSpec | None:
        return norm(name) if name in tensors else None

    def linear(name: str) -> nn.Linear:
        weight, bias = tensors[name + ".weight"], tensors.get(name + ".bias")
        with torch.device("meta"):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def layer(index: int) -> LayerSpec:
        name = f"layers.{index}."
        attention, mlp = name + "self_attn.", name + "mlp."
        return LayerSpec(
            tuple(linear(attention + part) for part in ("q_proj", "k_proj", "v_proj")),
            linear(attention + "o_proj"),
            (linear(mlp + "gate_proj"), linear(mlp + "up_proj")),
            linear(mlp + "down_proj"),
            norm(name + "input_layernorm.weight"),
            None,
            norm(name + "post_attention_layernorm.weight"),
            None,
            optional_norm(attention + "q_norm.weight"),
            optional_norm(attention + "k_norm.weight"),
            _ROTARY,
        )

    activation = activation_named(config.activation)
    if activation is None:
        raise UnsupportedModelError("draft", f"the head's activation is {config.activation}")
    reads = StateInputSpec(
        linear("fc"),
        optional_norm("input_norm.weight"),
        tuple(norm(f"fc_norm.{index}.weight") for index in range(config.num_states))
        if config.fc_norm
        else (),
        norm("layers.0.hidden_norm.weight"),
        config.norm_before_residual,
        config.norm_output,
    )
    with torch.device("meta"):
        embeds = nn.Embedding(*embedding.shape)
    embeds.weight = nn.Parameter(embedding, requires_grad=False)
    return DecoderSpec(
        embeds,
        1.0,
        tuple(layer(index) for index in range(config.num_layers)),
        norm("norm.weight"),
        linear("lm_head"),
        config.logit_scale,
        None,
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
        config.hidden_size,
        config.intermediate_size,
        activation,
        config.head_size**-0.5,
        None,
        1.0,
        {_ROTARY: RotaryTable(_rotary(config).to(embedding.device), None)},
        reads,
    )


def head_layers(config: HeadConfig, max_model_len: int) -> list[LayerShape]:
    """The keys and values of each layer for one token.

    Args:
        config: the head's configuration.
        max_model_len: longest context that is served.
    """
    windows = [None if w is None or w >= max_model_len else w for w in config.windows]
    heads, size = config.num_kv_heads, config.head_size
    return [LayerShape(heads, size, size, window) for window in windows]


def _rotary(config: HeadConfig) -> nn.Module:
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
