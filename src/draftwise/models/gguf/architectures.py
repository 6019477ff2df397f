"""The architectures of GGUF files that are served, and what each key means for them.

The meanings are llama.cpp's, which computes a file as its metadata says, by architecture. Keys that
llama.cpp does not read for an architecture have no effect here either, and are listed with the
reason. Any other key, and any other tensor, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from draftwise.models.gguf import names
from draftwise.models.gguf.metadata import Metadata
from draftwise.models.gguf.rotary import (
    FREQUENCIES,
    LONG,
    ROTARY_TENSORS,
    SHORT,
    UNROTATED,
    Rotary,
    mscale,
)

Settings = dict[str, Any]
QKV = ("attn_q", "attn_k", "attn_v")
_QKV = frozenset(QKV)


@dataclass(frozen=True)
class Shape:
    """What all architectures have.

    Attributes:
        hidden: size of the residual stream.
        num_layers: layers.
        heads: query heads.
        head_size: size of a head.
        rotary: the rotary embedding.
    """

    hidden: int
    num_layers: int
    heads: int
    head_size: int
    rotary: Rotary


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        model_type: that of the configuration; ``settings`` may choose another one.
        settings: the configuration beside what all architectures have.
        modules: names of the tensors of modules.
        epsilon: name of the norms' epsilon in the configuration.
        has_layer_norms: whether the norms subtract the mean; the key of their epsilon is another.
        ignored: keys without effect, and why.
        rotary_tensors: tensors of the rotary embedding that it may have.
        rotates_part: whether only the first numbers of a head may be rotated.
        has_free_heads: whether heads may have another size than hidden size / heads.
        head: whether the output projection has its own tensor; ``None`` if it may.
        is_permuted: whether rows of queries and keys that are rotated together are stored next to
            each other, and not half a head apart.
        adds_one: whether norms are stored with 1 added.
        joined: parameters that are not the weight or bias of one tensor.
        optional_biases: tensors whose bias counts as zero if it is missing.
        unused: tensors that a file may have although the model does not use them.
    """

    model_type: str
    settings: Callable[[Metadata, Shape], Settings] = lambda metadata, shape: {}
    modules: Mapping[str, str] = field(default_factory=lambda: names.LLAMA)
    epsilon: str = "rms_norm_eps"
    has_layer_norms: bool = False
    ignored: Mapping[str, str] = field(default_factory=dict)
    rotary_tensors: frozenset[str] = frozenset()
    rotates_part: bool = False
    has_free_heads: bool = False
    head: bool | None = None
    is_permuted: bool = False
    adds_one: bool = False
    joined: Mapping[str, names.Joined] = field(default_factory=dict)
    optional_biases: frozenset[str] = _QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    unused: Callable[[Metadata], Iterable[str]] = lambda metadata: ()


_UNREAD = "llama.cpp does not read it for this architecture"
_NO_WINDOW = "llama.cpp attends to the whole context in this architecture"
_ROUTING = "llama.cpp routes this architecture in one way"

# Without effect everywhere.
IGNORED: Mapping[str, str] = {
    "vocab_size": "the rows of the embedding are counted",
    "tensor_data_layout": "where old files came from",
    "rope.scaling.finetuned": "only Granite reads it",
    "rope.scaling.yarn_ext_factor": _UNREAD,
    "rope.scaling.yarn_attn_factor": _UNREAD,
    "rope.scaling.yarn_beta_fast": _UNREAD,
    "rope.scaling.yarn_beta_slow": _UNREAD,
    "rope.scaling.yarn_log_multiplier": _UNREAD,
    "attention.layer_norm_epsilon": "the norms have another key",
    "attention.layer_norm_rms_epsilon": "the norms have another key",
}
# Values that leave the model as it is.
WITHOUT_EFFECT: Mapping[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
}
_WINDOWS = {
    "attention.sliding_window": _NO_WINDOW,
    "attention.sliding_window_pattern": _NO_WINDOW,
}
_LLAMA_UNREAD = {
    **dict.fromkeys(
        (
            "attention.scale",
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        _UNREAD,
    ),
    **dict.fromkeys(
        (
            "expert_weights_norm",
            "expert_weights_scale",
            "expert_gating_func",
            "expert_feed_forward_length",
        ),
        _ROUTING,
    ),
}
_EXPERTS_UNREAD = {"expert_weights_norm": _ROUTING, "expert_weights_scale": _ROUTING}


def _has(metadata: Metadata, *parts: str) -> bool:
    """Whether any layer has one of some tensors."""
    return any(name.split(".", 2)[-1] in parts for name in metadata.file.tensors)


def _attention_bias(metadata: Metadata) -> Settings:
    parts = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias", "attn_output.bias")
    return {"attention_bias": _has(metadata, *parts)}


def _biases(metadata: Metadata, shape: Shape) -> Settings:
    mlp = _has(metadata, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
    return {**_attention_bias(metadata), "mlp_bias": mlp}


def _layer_types(metadata: Metadata, shape: Shape, period: int | None) -> list[str]:
    """Which layers have a window: an array of booleans, or all but each ``period``-th layer."""
    name = "attention.sliding_window_pattern"
    found = metadata.value(name, period)
    if isinstance(found, list):
        slides = found
    elif isinstance(found, int) and found > 0:
        slides = [layer % found < found - 1 for layer in range(shape.num_layers)]
    else:
        slides = []
    if len(slides) != shape.num_layers:
        raise metadata.refuse(name, f"it must be a period or {shape.num_layers} booleans")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _no_window(metadata: Metadata, shape: Shape) -> Settings:
    return {"sliding_window": None, "use_sliding_window": False}


def _same_base(metadata: Metadata, shape: Shape) -> None:
    """Refuse another rotary base for sliding layers."""
    base = shape.rotary.base
    metadata.require("rope.freq_base_swa", base, because=f"it must equal rope.freq_base, {base}")


def _gemma_scale(metadata: Metadata, shape: Shape, largest: int) -> Settings:
    """Scores are divided by a root, which the largest model of a generation chooses otherwise."""
    is_largest = shape.num_layers == largest
    return {
        "query_pre_attn_scalar": shape.hidden // shape.heads if is_largest else shape.head_size,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _experts(metadata: Metadata) -> Settings:
    """Number of experts and of those that each token chooses, without groups."""
    if metadata.value("expert_group_count", 0) not in (0, 1):
        raise metadata.refuse("expert_group_count", "groups of experts are not supported")
    metadata.ignore(["expert_group_used_count"])
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
    }


def _llama(metadata: Metadata, shape: Shape) -> Settings:
    if not metadata.value("expert_count", 0):
        return _biases(metadata, shape)
    experts = _experts(metadata)
    return {
        "model_type": "mixtral",
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "sliding_window": None,
    }


def _mistral3(metadata: Metadata, shape: Shape) -> Settings:
    scaling = "rope.scaling.yarn_"
    parameters = shape.rotary.parameters()
    if parameters["rope_type"] == "yarn":
        factor = shape.rotary.factor
        multiplier = metadata.number(f"{scaling}log_multiplier", 0.0)
        if multiplier:
            parameters["attention_factor"] /= mscale(factor, multiplier)
        parameters["beta_fast"] = metadata.number(f"{scaling}beta_fast", 32.0)
        parameters["beta_slow"] = metadata.number(f"{scaling}beta_slow", 1.0)
    return {
        "sliding_window": None,
        "rope_parameters": {
            **parameters,
            "llama_4_scaling_beta": metadata.number("attention.temperature_scale", 0.0),
            "original_max_position_embeddings": shape.rotary.original,
        },
    }


def _granite(metadata: Metadata, shape: Shape) -> Settings:
    rotary, length = shape.rotary, shape.rotary.original
    if not metadata.flag("rope.scaling.finetuned", True):  # then no layer is rotated
        rotary = Rotary(rotary.base, (UNROTATED,) * (shape.head_size // 2), original=length)
    return {
        **_biases(metadata, shape),
        "rope_parameters": rotary.parameters(),
        "logits_scaling": metadata.number("logit_scale"),
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.number("attention.scale", 0.0) or shape.head_size**-0.5,
    }


def _smollm3(metadata: Metadata, shape: Shape) -> Settings:
    rotates = [int(layer % 4 != 3) for layer in range(shape.num_layers)]
    return {"use_sliding_window": False, "no_rope_layers": rotates}


def _qwen3(metadata: Metadata, shape: Shape) -> Settings:
    return {"use_sliding_window": False, **_attention_bias(metadata)}


def _expert_width(metadata: Metadata, num_used: int) -> int:
    """Size of an expert: its own key, or that of all experts that a token chooses together."""
    if metadata.has("expert_feed_forward_length"):
        return metadata.count("expert_feed_forward_length")
    return metadata.count("feed_forward_length") // num_used


def _qwen_experts(metadata: Metadata, normalised: bool) -> Settings:
    experts = _experts(metadata)
    return {
        **experts,
        "moe_intermediate_size": _expert_width(metadata, experts["num_experts_per_tok"]),
        "norm_topk_prob": normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _qwen2moe(metadata: Metadata, shape: Shape) -> Settings:
    shared = "expert_shared_feed_forward_length"
    inner = metadata.count(shared if metadata.has(shared) else "feed_forward_length")
    return {**_qwen_experts(metadata, False), "shared_expert_intermediate_size": inner}


def _qwen3moe(metadata: Metadata, shape: Shape) -> Settings:
    return {**_qwen_experts(metadata, True), **_attention_bias(metadata)}


def _gemma(metadata: Metadata, shape: Shape) -> Settings:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(metadata: Metadata, shape: Shape) -> Settings:
    _same_base(metadata, shape)
    cap = metadata.number("attn_logit_softcapping", 50.0)
    if cap <= 0:
        raise metadata.refuse("attn_logit_softcapping", "it must be positive")
    return {
        **_gemma_scale(metadata, shape, 46),
        "attn_logit_softcapping": cap,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": metadata.count("attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, shape, 2),
    }


def _gemma3(metadata: Metadata, shape: Shape) -> Settings:
    sliding = shape.rotary.unscaled(metadata.number("rope.freq_base_swa", 10000.0))
    if metadata.value("attention.sliding_window", 0):
        window = metadata.count("attention.sliding_window")
        types = _layer_types(metadata, shape, 6)
    else:
        metadata.ignore(["attention.sliding_window_pattern"])
        window, types = shape.hidden, ["full_attention"] * shape.num_layers
    return {
        **_gemma_scale(metadata, shape, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": types,
        "rope_parameters": {
            "full_attention": shape.rotary.parameters(),
            "sliding_attention": sliding.parameters(),
        },
    }


def _gemma4(metadata: Metadata, shape: Shape) -> Settings:
    size = metadata.count("attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.require(name, size, because=f"it must equal attention.key_length_swa, {size}")
    if metadata.value("rope.dimension_count_swa") is None:
        raise metadata.refuse("rope.dimension_count_swa", "it is needed")
    if FREQUENCIES not in metadata.file.tensors:
        raise metadata.file.error(f"has no tensor {FREQUENCIES!r}")
    rotary = shape.rotary
    divisors = rotary.divisors or ()
    rotated = divisors.count(1.0)
    if divisors[:rotated] != (1.0,) * rotated or min(divisors[rotated:], default=inf) < UNROTATED:
        raise metadata.file.error(
            f"has other numbers than 1 and 1e30 in the tensor {FREQUENCIES!r}, which is not "
            "supported"
        )
    if rotary.factor != 1 or rotary.attention != 1:
        raise metadata.refuse("rope.scaling.factor", "scaled positions are not supported")
    base = metadata.number("rope.freq_base_swa", 10000.0)
    settings: Settings = {
        "head_dim": size,
        "global_head_dim": shape.head_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": _layer_types(metadata, shape, None),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
        "num_kv_shared_layers": _shared_layers(metadata),
        **_gemma4_heads(metadata, shape),
        **_gemma4_width(metadata, shape),
        "hidden_size_per_layer_input": metadata.value("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": metadata.file.tensors["token_embd.weight"][0],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": rotary.base,
                "partial_rotary_factor": rotated / len(divisors),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }
    if settings["layer_types"][-1] != "full_attention":
        raise metadata.refuse("attention.sliding_window_pattern", "the last layer must not slide")
    if metadata.value("expert_count", 0):
        experts = _experts(metadata)
        settings |= {
            "enable_moe_block": True,
            "num_experts": experts["num_experts"],
            "top_k_experts": experts["num_experts_per_tok"],
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        }
    return settings


def _shared_layers(metadata: Metadata) -> int:
    """The number of last layers that use the keys and values of others."""
    name = "attention.shared_kv_layers"
    return metadata.count(name) if metadata.value(name, 0) else 0


def _unused_by_shared_layers(metadata: Metadata) -> Iterable[str]:
    last = metadata.count("block_count")
    for layer in range(last - _shared_layers(metadata), last):
        for tensor in ("attn_k", "attn_v", "attn_k_norm"):
            yield f"blk.{layer}.{tensor}.weight"


def _gemma4_width(metadata: Metadata, shape: Shape) -> Settings:
    """Feed-forward blocks have the same width, or twice that in layers that share keys."""
    name = "feed_forward_length"
    found, shared = metadata.value(name), _shared_layers(metadata)
    if not isinstance(found, list) or len(found) != shape.num_layers or not shared:
        return {"intermediate_size": metadata.count(name)}
    own = shape.num_layers - shared
    if found == [found[0]] * own + [2 * found[0]] * shared:
        return {"intermediate_size": found[0], "use_double_wide_mlp": True}
    return {"intermediate_size": metadata.count(name)}


def _gemma4_heads(metadata: Metadata, shape: Shape) -> Settings:
    """Key-value heads of layers with and without a window, and whether the latter have values."""
    name = "attention.head_count_kv"
    found = metadata.value(name, shape.heads)
    heads = found if isinstance(found, list) else [found] * shape.num_layers
    slides = [each == "sliding_attention" for each in _layer_types(metadata, shape, None)]
    by_type = {
        kind: {count for count, each in zip(heads, slides, strict=False) if each is kind}
        for kind in (True, False)
    }
    if len(heads) != shape.num_layers or any(len(each) > 1 for each in by_type.values()):
        raise metadata.refuse(name, "layers of the same type that differ in it are not supported")
    first = slides.index(False) if False in slides else 0
    own_values = f"blk.{first}.attn_v.weight" in metadata.file.tensors
    full = by_type[False].pop() if by_type[False] else shape.heads
    sliding = by_type[True].pop() if by_type[True] else full
    if own_values and sliding != full:
        raise metadata.refuse(name, "layers that differ in it must use their keys as values")
    return {
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": not own_values,
    }


def _olmo2(metadata: Metadata, shape: Shape) -> Settings:
    metadata.ignore(["rope.freq_base_swa"])  # llama.cpp rotates all layers with rope.freq_base
    if not metadata.value("attention.sliding_window", 0):
        metadata.ignore(["attention.sliding_window_pattern"])
        return _attention_bias(metadata)
    default = {"rope_type": "default", "rope_theta": shape.rotary.base}
    return {
        **_attention_bias(metadata),
        "model_type": "olmo3",
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": _layer_types(metadata, shape, 4),
        "rope_parameters": {
            "full_attention": shape.rotary.parameters(),
            "sliding_attention": default,
        },
    }


def _gpt_oss(metadata: Metadata, shape: Shape) -> Settings:
    _same_base(metadata, shape)
    experts = _experts(metadata)
    return {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": _layer_types(metadata, shape, 2),
        "attention_bias": True,
    }


def _exaone4(metadata: Metadata, shape: Shape) -> Settings:
    if shape.num_layers == 64:  # only the 32B model has windows
        window = metadata.count("attention.sliding_window", 4096)
        types: list[str] = _layer_types(metadata, shape, 4)
    else:
        metadata.ignore(_WINDOWS)
        window, types = None, ["full_attention"] * shape.num_layers
    metadata.ignore(["rope.freq_base_swa"])  # llama.cpp rotates all layers with rope.freq_base
    return {
        "sliding_window": window,
        "layer_types": types,
        "sliding_window_pattern": None if window is None else 4,
    }


def _hunyuan(metadata: Metadata, shape: Shape) -> Settings:
    because = "experts are not supported in this architecture"
    metadata.require("expert_count", 0, 1, because=because)
    metadata.ignore(["expert_used_count"])
    alpha, size = metadata.number("rope.scaling.alpha", 0.0), shape.head_size
    if alpha <= 0:
        return {}
    parameters = shape.rotary.parameters()
    return {
        "rope_parameters": {
            **parameters,
            "rope_theta": shape.rotary.base * alpha ** (size / (size - 2)),
        }
    }


def _starcoder2(metadata: Metadata, shape: Shape) -> Settings:
    return {"use_bias": True, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}


def _gpt2(metadata: Metadata, shape: Shape) -> Settings:
    return {
        "n_positions": metadata.count("context_length"),
        "n_inner": metadata.count("feed_forward_length"),
        "activation_function": "gelu_new",
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        _llama,
        ignored={**_WINDOWS, **_LLAMA_UNREAD},
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
        joined=names.EXPERTS,
    ),
    "mistral3": Architecture(
        "ministral3",
        _mistral3,
        ignored={**_WINDOWS, "attention.scale": _UNREAD},
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
    ),
    "granite": Architecture(
        "granite",
        _granite,
        rotary_tensors=ROTARY_TENSORS,
        has_free_heads=True,
        is_permuted=True,
    ),
    "smollm3": Architecture("smollm3", _smollm3, has_free_heads=True, is_permuted=True),
    "qwen2": Architecture("qwen2", _no_window, ignored=_WINDOWS),
    "qwen3": Architecture("qwen3", _qwen3, ignored=_WINDOWS, has_free_heads=True),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _qwen2moe,
        ignored={**_WINDOWS, **_EXPERTS_UNREAD},
        head=True,
        joined=names.EXPERTS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _qwen3moe,
        ignored={
            **_WINDOWS,
            **_EXPERTS_UNREAD,
            "leading_dense_block_count": _ROUTING,
            "expert_shared_count": _ROUTING,
        },
        has_free_heads=True,
        joined=names.EXPERTS,
    ),
    "gemma": Architecture("gemma", _gemma, has_free_heads=True, head=False, adds_one=True),
    "gemma2": Architecture(
        "gemma2", _gemma2, names.GEMMA, has_free_heads=True, head=False, adds_one=True
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _gemma3,
        names.GEMMA,
        ignored={"attn_logit_softcapping": _UNREAD, "attention.scale": _UNREAD},
        has_free_heads=True,
        adds_one=True,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _gemma4,
        names.GEMMA4,
        rotary_tensors=frozenset({FREQUENCIES}),
        has_free_heads=True,
        joined=names.GEMMA4_EXPERTS,
        unused=_unused_by_shared_layers,
    ),
    "phi3": Architecture(
        "phi3",
        _no_window,
        ignored=_WINDOWS,
        rotary_tensors=frozenset({LONG, SHORT}),
        rotates_part=True,
    ),
    "olmo2": Architecture("olmo2", _olmo2, names.POST_NORMS, head=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        _gpt_oss,
        names.GPT_OSS,
        ignored=_EXPERTS_UNREAD,
        has_free_heads=True,
        head=True,
        joined=names.GPT_OSS_EXPERTS,
        optional_biases=_QKV,
    ),
    "glm4": Architecture(
        "glm4",
        lambda metadata, shape: _attention_bias(metadata),
        names.GLM4,
        rotates_part=True,
        has_free_heads=True,
    ),
    "exaone4": Architecture(
        "exaone4",
        _exaone4,
        names.POST_NORMS,
        rotary_tensors=frozenset({FREQUENCIES}),
    ),
    "seed_oss": Architecture(
        "seed_oss",
        lambda metadata, shape: {**_attention_bias(metadata), "attention_out_bias": False},
        names.SEED_OSS,
        has_free_heads=True,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _hunyuan, names.HUNYUAN, has_free_heads=True),
    "ernie4_5": Architecture(
        "ernie4_5",
        lambda metadata, shape: {"use_bias": _attention_bias(metadata)["attention_bias"]},
        has_free_heads=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _starcoder2,
        names.STARCODER2,
        "norm_epsilon",
        has_layer_norms=True,
        optional_biases=_QKV,
    ),
    "gpt2": Architecture(
        "gpt2",
        _gpt2,
        names.GPT2,
        "layer_norm_epsilon",
        has_layer_norms=True,
        joined=names.GPT2_LINEAR,
        optional_biases=frozenset(),
    ),
}
