"""The families of models that :class:`draftwise.models.decoder_spec.DecoderSpec` describes.

A family says how transformers' modules name their parts, and where they differ from Llama.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from draftwise.checkpoints.stored.inputs import quantizes_inputs
from draftwise.models.decoder_spec import (
    DecoderSpec,
    LayerSpec,
    NormSpec,
    RotaryTable,
    StateInputSpec,
    activation_named,
)
from draftwise.models.experts_spec import ExpertsSpec, experts_spec
from draftwise.models.recurrence_spec import input_projections, recurrence_spec


@dataclass(frozen=True)
class _Family:
    """How a family names its modules and defines its norms.

    Attributes:
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: attribute of a layer that holds
            the norm; ``None`` if the family has none.
        adds_one: whether a norm's factor is 1 + weight.
        scales_embedding: whether the embedding is multiplied by √hidden_size in its own dtype.
        norm: attribute of the decoder that holds the norm before the head.
        out: attribute of attention that holds the layer of its output.
        head_norms: attributes of attention that hold the norms of queries and keys.
        mlp: attribute of a layer that holds the feed-forward block that all tokens use.
        gate_up, down: attributes of that block that hold its linear layers.
        experts: attribute of a layer that holds its experts; ``None`` for that of ``mlp``.
        recurrence: attribute of a layer that holds a recurrence in place of attention; ``None`` if
            all layers have attention.
        has_gates: whether each query is followed by a gate of the head's output.
        activation: name of the activation; ``None`` for that of the configuration.
    """

    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    adds_one: bool = False
    scales_embedding: bool = False
    norm: str = "norm"
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    experts: str | None = None
    recurrence: str | None = None
    has_gates: bool = False
    activation: str | None = None


_LLAMA = _Family()
_OLMO = _Family(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA = _Family(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    adds_one=True,
    scales_embedding=True,
)
_QWEN35 = _Family(adds_one=True, recurrence="linear_attn", has_gates=True)
_FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Phi3ForCausalLM": _LLAMA,
    "GraniteForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
    "GemmaForCausalLM": _Family(adds_one=True, scales_embedding=True),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Olmo2ForCausalLM": _OLMO,
    "Olmo3ForCausalLM": _OLMO,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2MoeForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": _LLAMA,
    "OlmoeForCausalLM": _LLAMA,
    "Glm4MoeForCausalLM": _LLAMA,
    "GptOssForCausalLM": _LLAMA,
    "Qwen3NextForCausalLM": _QWEN35,
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5MoeForCausalLM": _QWEN35,
    "Lfm2ForCausalLM": _Family(
        "operator_norm",
        mlp_norm="ffn_norm",
        norm="embedding_norm",
        out="out_proj",
        head_norms=("q_layernorm", "k_layernorm"),
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
        recurrence="conv",
        activation="silu",
    ),
    "GraniteMoeHybridForCausalLM": _Family(
        mlp="shared_mlp",
        gate_up=("input_linear",),
        down="output_linear",
        experts="block_sparse_moe",
        recurrence="mamba",
    ),
}
DESCRIBED_ARCHITECTURES = frozenset(_FAMILIES)
# Those that only the native kernels compute.
HYBRID_ARCHITECTURES = frozenset(name for name, each in _FAMILIES.items() if each.recurrence)


def is_described(model: nn.Module) -> bool:
    """Whether a model belongs to a family that :func:`decoder_spec` can describe."""
    return _architecture(model) in _FAMILIES


def _architecture(model: nn.Module) -> str:
    """The class of a model, or for a model of text and images that of its text model."""
    name = type(model).__name__
    if name in _FAMILIES or not hasattr(model, "get_decoder"):
        return name
    decoder = _decoder(model)
    is_part = getattr(decoder, "config", None) is not getattr(model, "config", None)
    # Gemma3TextModel belongs to Gemma3ForCausalLM.
    text = type(decoder).__name__.removesuffix("Model").removesuffix("Text")
    return f"{text}ForCausalLM" if is_part and f"{text}ForCausalLM" in _FAMILIES else name


def _decoder(model: Any) -> Any:
    return model.get_decoder()


def why_not_described(model: nn.Module) -> str | None:
    """Why :func:`decoder_spec` cannot describe a model, as a clause; ``None`` if it can."""
    if not is_described(model):
        return f"its architecture is {type(model).__name__}"
    causal: Any = model
    config, family = causal.config.get_text_config(), _FAMILIES[_architecture(model)]
    activation = _activation_name(config, family)
    if activation_named(activation) is None:
        return f"its activation is {activation}"
    if family.recurrence and not any(map(_attention, _decoder(causal).layers)):
        return "none of its layers has attention"
    if quantizes_inputs(model):
        return "its layers quantise their inputs"
    if causal.get_output_embeddings().bias is not None:
        return "its head has a bias"
    if getattr(config, "clip_qkv", None) is not None:
        return "it limits queries, keys and values"
    if getattr(config, "n_group", 1) not in (None, 1):
        return "its experts are chosen in groups"
    return None


def why_not_operations(model: nn.Module) -> str | None:
    """Why :class:`draftwise.models.decoder.DecoderForward` cannot compute a model.

    Returns:
        A clause; ``None`` if it can.
    """
    reason = why_not_described(model)
    if reason is not None:
        return reason
    if _architecture(model) in HYBRID_ARCHITECTURES:
        return "its layers have a recurrence"
    if any(hasattr(module, "experts") for module in model.modules()):
        return "its layers have experts"
    return None


def decoder_spec(model: nn.Module) -> DecoderSpec:
    """Describe a model.

    Args:
        model: a model for which :func:`why_not_described` returns ``None``.
    """
    causal: Any = model
    decoder, config = _decoder(causal), causal.config.get_text_config()
    family = _FAMILIES[_architecture(model)]
    norm, rotary = getattr(decoder, family.norm), getattr(decoder, "rotary_emb", None)
    spec = _spec(family, config, decoder.embed_tokens, decoder.layers, norm, rotary)
    return replace(
        spec,
        embedding_scale=_embedding_scale(decoder.embed_tokens, family, config),
        head=causal.get_output_embeddings(),
        logit_scale=1.0 / getattr(config, "logits_scaling", 1.0),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def mtp_spec(model: nn.Module, layer: Any, rotary: nn.Module | None) -> DecoderSpec:
    """Describe the MTP layer of a model as a head that uses the model's projection.

    Args:
        model: the model, for which :func:`why_not_described` returns ``None``.
        layer: a ``MtpLayer`` of transformers, for which :func:`why_not_described_mtp` returns
            ``None``.
        rotary: the rotary embedding.
    """
    decoder, family = _decoder(model), _FAMILIES[_architecture(model)]
    blocks = [layer.mtp_block]
    spec = _spec(family, layer.config, decoder.embed_tokens, blocks, layer.post_norm, rotary)
    reads = StateInputSpec(
        layer.eh_proj,
        _norm(getattr(decoder, family.norm), family),
        (),
        _norm(layer.hnorm, family),
        norm_before_residual=False,
        norm_output=True,
        embedding_norm=_norm(layer.enorm, family),
    )
    return replace(spec, state_input=reads)


def why_not_described_mtp(model: nn.Module, layer: Any) -> str | None:
    """Why :func:`mtp_spec` cannot describe an MTP layer, as a clause; ``None`` if it can.

    Args:
        model: the model, for which :func:`why_not_described` returns ``None``.
        layer: its ``MtpLayer`` of transformers.
    """
    norm = getattr(_decoder(model), _FAMILIES[_architecture(model)].norm)
    if any(type(each) is not type(norm) for each in (layer.enorm, layer.hnorm, layer.post_norm)):
        return "its norms are not of the kind of its target's"
    if getattr(layer.config, "mtp_hidden_states_first", False):
        return "it reads the state before the token"
    return None


def _spec(
    family: _Family,
    config: Any,
    embedding: nn.Embedding,
    modules: Iterable[Any],
    norm: Any,
    rotary: nn.Module | None,
) -> DecoderSpec:
    """Describe layers of a family, without a head."""
    modules = list(modules)
    attention = next(filter(None, map(_attention, modules)))
    head_size: int = attention.head_dim
    num_heads = getattr(attention, family.out).in_features // head_size
    layers = tuple(_layer(layer, family, config, rotary is not None) for layer in modules)
    widths = sum(each.out_features for each in _qkv(attention)) // head_size
    num_queries = num_heads * (2 if family.has_gates else 1)
    activation = activation_named(_activation_name(config, family))
    assert activation is not None
    return DecoderSpec(
        embedding,
        1.0,
        layers,
        _norm(norm, family),
        None,
        1.0,
        None,
        num_heads,
        (widths - num_queries) // 2,
        head_size,
        embedding.embedding_dim,
        activation,
        attention.scaling,
        getattr(config, "attn_logit_softcapping", None),
        getattr(config, "residual_multiplier", 1.0),
        {} if rotary is None else _rotary(rotary, layers),
        has_gates=family.has_gates,
    )


def _attention(layer: Any) -> Any:
    """The attention of a layer; ``None`` if it has a recurrence."""
    return getattr(layer, "self_attn", None)


def _qkv(attention: Any) -> tuple[nn.Linear, ...]:
    if hasattr(attention, "qkv_proj"):
        return (attention.qkv_proj,)
    return attention.q_proj, attention.k_proj, attention.v_proj


def _layer(layer: Any, family: _Family, config: Any, has_rotary: bool) -> LayerSpec:
    attention, mlp = _attention(layer), getattr(layer, family.mlp)
    experts = _experts(layer, family)
    if hasattr(mlp, "experts"):  # of these, the block that all tokens use
        mlp = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
    gate_up: tuple[nn.Linear, ...] = ()
    if mlp is not None:
        is_joined = hasattr(mlp, "gate_up_proj")
        names = ("gate_up_proj",) if is_joined else family.gate_up
        gate_up = tuple(getattr(mlp, name) for name in names)
    mixer = attention
    if attention is None:
        assert family.recurrence is not None
        mixer = getattr(layer, family.recurrence)
    q_norm, k_norm = family.head_norms

    def norm(module: Any, name: str | None) -> NormSpec | None:
        found = None if name is None else getattr(module, name, None)
        return None if found is None else _norm(found, family)

    return LayerSpec(
        input_projections(mixer) if attention is None else _qkv(attention),
        mixer.out_proj if attention is None else getattr(attention, family.out),
        gate_up,
        None if mlp is None else getattr(mlp, family.down),
        norm(layer, family.attention_norm),
        norm(layer, family.attention_out_norm),
        norm(layer, family.mlp_norm),
        norm(layer, family.mlp_out_norm),
        norm(attention, q_norm),
        norm(attention, k_norm),
        _rotary_key(attention, config) if has_rotary and attention is not None else None,
        experts,
        attention.sinks.detach().float() if hasattr(attention, "sinks") else None,
        recurrence_spec(mixer) if attention is None else None,
    )


def _experts(layer: Any, family: _Family) -> ExpertsSpec | None:
    block = getattr(layer, family.experts or family.mlp)
    return experts_spec(block) if hasattr(block, "experts") else None


def _norm(norm: Any, family: _Family) -> NormSpec:
    weight = norm.weight.detach().float()
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return NormSpec(weight + 1.0 if family.adds_one else weight, epsilon)


def _embedding_scale(embedding: nn.Embedding, family: _Family, config: Any) -> float:
    if family.scales_embedding:
        # The models round the factor to the dtype of the weights. Those that keep it rounded it to
        # the dtype that they were loaded in.
        kept = getattr(embedding, "embed_scale", config.hidden_size**0.5)
        return float(torch.as_tensor(kept).to(embedding.weight.dtype))
    scale: float = getattr(config, "embedding_multiplier", 1.0)
    return scale


def _activation_name(config: Any, family: _Family) -> str:
    if family.activation is not None:
        return family.activation
    # Gemma's configurations have two fields. The models use the first one.
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    return str(name)


def _rotary_key(attention: Any, config: Any) -> str | None:
    if not getattr(attention, "use_rope", True):
        return None
    types = getattr(config, "layer_types", None)
    return str(types[attention.layer_idx]) if types else "full_attention"


def _rotary(module: nn.Module, layers: tuple[LayerSpec, ...]) -> dict[str, RotaryTable]:
    by_type = "layer_type" in inspect.signature(module.forward).parameters
    keys = sorted({layer.rotary for layer in layers if layer.rotary is not None})
    if by_type:
        return {key: RotaryTable(module, key) for key in keys}
    shared = RotaryTable(module, None)
    return dict.fromkeys(keys, shared)
