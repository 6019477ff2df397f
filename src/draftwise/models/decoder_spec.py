"""Decoder-only models as data: what Draftwise's own forward passes read of Hugging Face's modules.

A :class:`DecoderSpec` describes the families that differ from Llama in norms, activation, rotary
embedding, biases, experts and constant factors.
:class:`draftwise.kernels.native.decoder.NativeDecoder` computes any model that has one, and
:class:`draftwise.models.decoder.DecoderForward` any such model without experts. Windows of
attention are not part of it: they belong to :class:`draftwise.models.kv_cache.LayerShape`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.rotary import depends_on_length, rotary_settings
from draftwise.checkpoints.stored.inputs import quantizes_inputs
from draftwise.models.experts_spec import ExpertsSpec, experts_spec


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
        qkv: linear layers that together compute queries, keys and values, in this order.
        out: the linear layer of the attention's output.
        gate_up: linear layers that together compute gate and up projection, in this order; empty if
            the layer has only experts.
        down: the linear layer of the feed-forward block's output; ``None`` if the layer has only
            experts.
        attention_norm: norm of the attention's input; ``None`` for none.
        attention_out_norm: norm of the attention's output before it is added; ``None`` for none.
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
    :class:`draftwise.models.heads.forward.HeadForward`. Or the normalised states are rows of a
    context; see :class:`draftwise.models.heads.block_forward.BlockForward`.

    Attributes:
        projection: the linear layer from the target's states to the head's residual stream.
        joint_norm: norm of all states together before they are projected; ``None`` for none.
        norms: norm of each state before it is projected; empty for none.
        state_norm: norm of the projected state.
        norm_before_residual: whether the residual stream begins with the normalised state.
        norm_output: whether the next token of a draft reads the output after the final norm.
        is_context: whether the states are rows of a context, which have keys and values in every
            layer and nothing else.
    """

    projection: nn.Linear
    joint_norm: NormSpec | None
    norms: tuple[NormSpec, ...]
    state_norm: NormSpec
    norm_before_residual: bool
    norm_output: bool
    is_context: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only model.

    Attributes:
        embedding: the token embedding.
        embedding_scale: factor of the embedding.
        layers: the decoder layers.
        norm: the norm before the head.
        head: the linear layer that computes the logits; ``None`` for a drafting head that uses its
            target's.
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

    @property
    def experts(self) -> list[ExpertsSpec]:
        """The experts of all layers that have some."""
        return [layer.experts for layer in self.layers if layer.experts is not None]


@dataclass(frozen=True)
class _Family:
    """How a family names and defines its norms.

    Attributes:
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: attribute of a layer that holds
            the norm; ``None`` if the family has none.
        adds_one: whether a norm's factor is 1 + weight.
        scales_embedding: whether the embedding is multiplied by √hidden_size in its own dtype.
    """

    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    adds_one: bool = False
    scales_embedding: bool = False


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
}
DESCRIBED_ARCHITECTURES = frozenset(_FAMILIES)


def activation_named(name: str) -> Activation | None:
    """The activation with a name of a configuration; ``None`` if it is not supported."""
    return _ACTIVATIONS.get(name)


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
    activation = _activation_name(causal.config.get_text_config())
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}"
    if quantizes_inputs(model):
        return "its layers quantise their inputs"
    if causal.get_output_embeddings().bias is not None:
        return "its head has a bias"
    config = causal.config.get_text_config()
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
    if reason is None and any(hasattr(module, "experts") for module in model.modules()):
        return "its layers have experts"
    return reason


def decoder_spec(model: nn.Module) -> DecoderSpec:
    """Describe a model.

    Args:
        model: a model for which :func:`why_not_described` returns ``None``.
    """
    causal: Any = model
    decoder, config = _decoder(causal), causal.config.get_text_config()
    family = _FAMILIES[_architecture(model)]
    embedding: nn.Embedding = decoder.embed_tokens
    attention = decoder.layers[0].self_attn
    head_size: int = attention.head_dim
    num_heads = attention.o_proj.in_features // head_size
    layers = tuple(_layer(layer, family, config) for layer in decoder.layers)
    widths = sum(each.out_features for each in layers[0].qkv) // head_size
    return DecoderSpec(
        embedding,
        _embedding_scale(embedding, family, config),
        layers,
        _norm(decoder.norm, family),
        causal.get_output_embeddings(),
        1.0 / getattr(config, "logits_scaling", 1.0),
        getattr(config, "final_logit_softcapping", None),
        num_heads,
        (widths - num_heads) // 2,
        head_size,
        embedding.embedding_dim,
        _ACTIVATIONS[_activation_name(config)],
        attention.scaling,
        getattr(config, "attn_logit_softcapping", None),
        getattr(config, "residual_multiplier", 1.0),
        _rotary(decoder.rotary_emb, layers),
    )


def _layer(layer: Any, family: _Family, config: Any) -> LayerSpec:
    attention, mlp = layer.self_attn, layer.mlp
    experts = experts_spec(mlp) if hasattr(mlp, "experts") else None
    if experts is not None:  # of these, the block that all tokens use
        mlp = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
    qkv = (
        (attention.qkv_proj,)
        if hasattr(attention, "qkv_proj")
        else (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    gate_up: tuple[nn.Linear, ...] = ()
    if mlp is not None:
        is_joined = hasattr(mlp, "gate_up_proj")
        gate_up = (mlp.gate_up_proj,) if is_joined else (mlp.gate_proj, mlp.up_proj)

    def norm(module: Any, name: str | None) -> NormSpec | None:
        found = None if name is None else getattr(module, name, None)
        return None if found is None else _norm(found, family)

    return LayerSpec(
        qkv,
        attention.o_proj,
        gate_up,
        None if mlp is None else mlp.down_proj,
        norm(layer, family.attention_norm),
        norm(layer, family.attention_out_norm),
        norm(layer, family.mlp_norm),
        norm(layer, family.mlp_out_norm),
        norm(attention, "q_norm"),
        norm(attention, "k_norm"),
        _rotary_key(attention, config),
        experts,
        attention.sinks.detach().float() if hasattr(attention, "sinks") else None,
    )


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


def _activation_name(config: Any) -> str:
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


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.buffers(), *module.parameters()]
    return tensors[0].device if tensors else torch.device("cpu")
