"""Configurations of architectures other than Gemma from the metadata of GGUF files.

Every function takes the metadata and what all architectures have, and returns arguments of the
configuration's class.
"""

from __future__ import annotations

from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.rotary import UNROTATED, Rotary, mscale
from draftwise.checkpoints.gguf.shared_settings import (
    WINDOWS,
    Settings,
    Shape,
    attention_bias,
    biases,
    experts_settings,
    has_tensors,
    layer_types,
    local_experts,
    same_base,
)


def llama(metadata: Metadata, shape: Shape) -> Settings:
    """Llama, and Mixtral if there are experts."""
    if not metadata.value("expert_count", 0):
        return biases(metadata, shape)
    return {"model_type": "mixtral", **local_experts(metadata), "sliding_window": None}


def mistral3(metadata: Metadata, shape: Shape) -> Settings:
    """Mistral 3: YaRN's own keys, and queries that grow with the position."""
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


def attention_layers(metadata: Metadata, shape: Shape, other: str) -> Settings:
    """Layers with key-value heads are of attention, and those without of another type."""
    name = "attention.head_count_kv"
    counts = metadata.counts(name)
    kv_heads = set(counts) - {0}
    if len(kv_heads) != 1:
        raise metadata.refuse(name, "layers of attention must have the same number, and exist")
    return {
        "num_key_value_heads": kv_heads.pop(),
        "layer_types": ["full_attention" if count else other for count in counts],
    }


def lfm2(metadata: Metadata, shape: Shape) -> Settings:
    """LFM2: layers without keys and values are short convolutions."""
    return {
        **attention_layers(metadata, shape, "conv"),
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def granitehybrid(metadata: Metadata, shape: Shape) -> Settings:
    """Granite 4-H without experts: layers without keys and values are Mamba-2."""
    inner, heads = metadata.count("ssm.inner_size"), metadata.count("ssm.time_step_rank")
    if inner % shape.hidden or inner % heads:
        raise metadata.refuse(
            "ssm.inner_size", "it must be a multiple of the hidden size and heads"
        )
    settings = granite(metadata, shape)
    del settings["mlp_bias"]
    feed_forward = metadata.count("feed_forward_length")
    return {
        **settings,
        **attention_layers(metadata, shape, "linear_attention"),
        "position_embedding_type": "rope",
        "intermediate_size": feed_forward,
        "shared_intermediate_size": feed_forward,
        "num_local_experts": 0,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // shape.hidden,
        "mamba_n_groups": metadata.count("ssm.group_count"),
        "mamba_d_state": metadata.count("ssm.state_size"),
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_conv_bias": has_tensors(metadata, "ssm_conv1d.bias"),
    }


def granite(metadata: Metadata, shape: Shape) -> Settings:
    """Granite: constant factors, and no rotary embedding if the file says so."""
    rotary, length = shape.rotary, shape.rotary.original
    if not metadata.flag("rope.scaling.finetuned", True):  # then no layer is rotated
        rotary = Rotary(rotary.base, (UNROTATED,) * (shape.head_size // 2), original=length)
    return {
        **biases(metadata, shape),
        "rope_parameters": rotary.parameters(),
        "logits_scaling": metadata.number("logit_scale"),
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.number("attention.scale", 0.0) or shape.head_size**-0.5,
    }


def smollm3(metadata: Metadata, shape: Shape) -> Settings:
    """SmolLM3: every fourth layer is not rotated."""
    rotates = [int(layer % 4 != 3) for layer in range(shape.num_layers)]
    return {"use_sliding_window": False, "no_rope_layers": rotates}


def qwen3(metadata: Metadata, shape: Shape) -> Settings:
    """Qwen 3."""
    return {"use_sliding_window": False, **attention_bias(metadata)}


def _expert_width(metadata: Metadata, num_used: int) -> int:
    """Size of an expert: its own key, or that of all experts that a token chooses together."""
    if metadata.has("expert_feed_forward_length"):
        return metadata.count("expert_feed_forward_length")
    return metadata.count("feed_forward_length") // num_used


def qwen_experts(metadata: Metadata, normalised: bool) -> Settings:
    """Experts of Qwen, whose weights may be normalised."""
    experts = experts_settings(metadata)
    return {
        **experts,
        "moe_intermediate_size": _expert_width(metadata, experts["num_experts_per_tok"]),
        "norm_topk_prob": normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def qwen2moe(metadata: Metadata, shape: Shape) -> Settings:
    """Qwen 2 with experts, of which one is shared."""
    shared = "expert_shared_feed_forward_length"
    inner = metadata.count(shared if metadata.has(shared) else "feed_forward_length")
    return {**qwen_experts(metadata, False), "shared_expert_intermediate_size": inner}


def qwen3moe(metadata: Metadata, shape: Shape) -> Settings:
    """Qwen 3 with experts."""
    return {**qwen_experts(metadata, True), **attention_bias(metadata)}


def olmo2(metadata: Metadata, shape: Shape) -> Settings:
    """OLMo 2, and OLMo 3 if the file has a window."""
    metadata.ignore(["rope.freq_base_swa"])  # llama.cpp rotates all layers with rope.freq_base
    if not metadata.value("attention.sliding_window", 0):
        metadata.ignore(["attention.sliding_window_pattern"])
        return attention_bias(metadata)
    default = {"rope_type": "default", "rope_theta": shape.rotary.base}
    return {
        **attention_bias(metadata),
        "model_type": "olmo3",
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": layer_types(metadata, shape, 4),
        "rope_parameters": {
            "full_attention": shape.rotary.parameters(),
            "sliding_attention": default,
        },
    }


def gpt_oss(metadata: Metadata, shape: Shape) -> Settings:
    """gpt-oss: experts, attention sinks, and a window in every second layer."""
    same_base(metadata, shape)
    return {
        **local_experts(metadata),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": layer_types(metadata, shape, 2),
        "attention_bias": True,
    }


def exaone4(metadata: Metadata, shape: Shape) -> Settings:
    """EXAONE 4: windows in the 32B model only."""
    if shape.num_layers == 64:  # only the 32B model has windows
        window = metadata.count("attention.sliding_window", 4096)
        types: list[str] = layer_types(metadata, shape, 4)
    else:
        metadata.ignore(WINDOWS)
        window, types = None, ["full_attention"] * shape.num_layers
    metadata.ignore(["rope.freq_base_swa"])  # llama.cpp rotates all layers with rope.freq_base
    return {
        "sliding_window": window,
        "layer_types": types,
        "sliding_window_pattern": None if window is None else 4,
    }


def hunyuan(metadata: Metadata, shape: Shape) -> Settings:
    """Hunyuan: a base that grows with a factor."""
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


def starcoder2(metadata: Metadata, shape: Shape) -> Settings:
    """StarCoder 2."""
    return {"use_bias": True, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}


def stablelm(metadata: Metadata, shape: Shape) -> Settings:
    """StableLM: attention and feed-forward block read the same norm if there is only one."""
    return {
        "use_qkv_bias": attention_bias(metadata)["attention_bias"],
        "use_parallel_residual": not has_tensors(metadata, "ffn_norm.weight"),
    }


def nemotron(metadata: Metadata, shape: Shape) -> Settings:
    """Nemotron: a squared activation."""
    return {**biases(metadata, shape), "hidden_act": "relu2"}


def gpt2(metadata: Metadata, shape: Shape) -> Settings:
    """GPT-2."""
    return {
        "n_positions": metadata.count("context_length"),
        "n_inner": metadata.count("feed_forward_length"),
        "activation_function": "gelu_new",
    }
