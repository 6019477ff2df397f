"""Configurations of architectures whose experts are chosen in their own way, from GGUF files.

The functions are those of :mod:`draftwise.checkpoints.gguf.model_settings`, for architectures with
dense layers before those of experts, shared experts, or a bias that only chooses experts.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.model_settings import (
    attention_layers,
    granite,
    granitehybrid,
    lfm2,
)
from draftwise.checkpoints.gguf.parameter_names import Joined, by_layer
from draftwise.checkpoints.gguf.shared_settings import (
    Settings,
    Shape,
    attention_bias,
    experts_settings,
    has_tensors,
    local_experts,
)

_SIGMOID = 2


def _scored_by_sigmoid(metadata: Metadata) -> None:
    """Refuse a router whose scores are not the sigmoids of this architecture in transformers."""
    because = f"the scores of this architecture's experts are sigmoids, {_SIGMOID}"
    metadata.require("expert_gating_func", _SIGMOID, because=because)


def routed_experts(metadata: Metadata) -> Settings:
    """Experts of DeepSeek and of GLM: some are chosen, and all tokens read others."""
    return {
        **_chosen_experts(metadata),
        "n_shared_experts": metadata.count("expert_shared_count"),
        "first_k_dense_replace": _num_dense(metadata),
    }


def _chosen_experts(metadata: Metadata) -> Settings:
    """The experts of which some are chosen, and how their weights follow from their scores."""
    experts = experts_settings(metadata)
    return {
        "n_routed_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": 1,
        "topk_group": 1,
    }


def _num_dense(metadata: Metadata) -> int:
    """Number of layers without experts, which are the first ones."""
    name = "leading_dense_block_count"
    found = metadata.value(name, 0)
    if type(found) is not int or not 0 <= found <= metadata.num_layers:
        raise metadata.refuse(name, "it must be a number of layers")
    return found


def glm4moe(metadata: Metadata, shape: Shape) -> Settings:
    """GLM-4.5 to 4.7: a sigmoid with a bias, and experts that all tokens read."""
    _scored_by_sigmoid(metadata)
    return {
        **attention_bias(metadata),
        **routed_experts(metadata),
        "use_qk_norm": has_tensors(metadata, "attn_q_norm.weight"),
    }


def lfm2moe(metadata: Metadata, shape: Shape) -> Settings:
    """LFM2 with experts: a sigmoid with a bias."""
    _scored_by_sigmoid(metadata)
    settings = lfm2(metadata, shape)
    del settings["block_auto_adjust_ff_dim"]
    return {
        **settings,
        **experts_settings(metadata),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "num_dense_layers": _num_dense(metadata),
        "norm_topk_prob": True,
        "use_expert_bias": has_tensors(metadata, "exp_probs_b.bias"),
        "routed_scaling_factor": 1.0,
    }


def olmoe(metadata: Metadata, shape: Shape) -> Settings:
    """OLMoE: the weights of a token's experts are not normalised."""
    return {**experts_settings(metadata), **attention_bias(metadata), "norm_topk_prob": False}


def ernie4_5_moe(metadata: Metadata, shape: Shape) -> Settings:
    """ERNIE 4.5 with experts: a softmax with a bias, and experts that all tokens read."""
    experts = experts_settings(metadata)
    because = "every layer after the dense ones must have experts"
    metadata.require("interleave_moe_layer_step", 1, because=because)
    inner = metadata.count("expert_feed_forward_length")
    name = "expert_shared_feed_forward_length"
    shared = metadata.count(name, inner * metadata.count("expert_shared_count"))
    if shared % inner:
        raise metadata.refuse(name, f"it must be a multiple of {inner}, the size of an expert")
    return {
        "use_bias": attention_bias(metadata)["attention_bias"],
        "moe_num_experts": experts["num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": shared // inner,
        "moe_layer_start_index": _num_dense(metadata),
        "moe_layer_end_index": shape.num_layers - 1,
        "moe_layer_interval": 1,
    }


def minimax_m2(metadata: Metadata, shape: Shape) -> Settings:
    """MiniMax-M2: a sigmoid with a bias, and norms of all queries and of all keys."""
    _scored_by_sigmoid(metadata)
    return {
        **local_experts(metadata),
        "intermediate_size": metadata.count("feed_forward_length"),
    }


def nemotron_h(metadata: Metadata, shape: Shape) -> Settings:
    """Nemotron-H, 2 and 3: each layer is of attention, of Mamba-2, or a feed-forward block."""
    attention = attention_layers(metadata, shape, "linear_attention")
    widths = metadata.counts("feed_forward_length")
    has_experts = bool(metadata.value("expert_count", 0))
    block = "moe" if has_experts else "mlp"
    if len(set(widths) - {0}) != 1:
        name = "feed_forward_length"
        raise metadata.refuse(name, "feed-forward blocks must have the same size, and exist")
    inner, heads = metadata.count("ssm.inner_size"), metadata.count("ssm.time_step_rank")
    if inner % heads:
        raise metadata.refuse("ssm.inner_size", f"it must be a multiple of the {heads} heads")
    return {
        "num_key_value_heads": attention["num_key_value_heads"],
        "intermediate_size": max(widths),
        "layers_block_type": [
            block if width and kind == "linear_attention" else kind
            for kind, width in zip(attention["layer_types"], widths, strict=True)
        ],
        "mlp_bias": has_tensors(metadata, "ffn_up.bias", "ffn_down.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": metadata.count("ssm.group_count"),
        "ssm_state_size": metadata.count("ssm.state_size"),
        "conv_kernel": metadata.count("ssm.conv_kernel"),
        "use_conv_bias": has_tensors(metadata, "ssm_conv1d.bias"),
        **(_nemotron_experts(metadata) if has_experts else {}),
    }


def _nemotron_experts(metadata: Metadata) -> Settings:
    return {
        **_chosen_experts(metadata),
        "moe_shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.value("moe_latent_size") or None,
    }


def granitemoe(metadata: Metadata, shape: Shape) -> Settings:
    """Granite with experts, and an expert that all tokens read if the file has one."""
    settings = granite(metadata, shape)
    del settings["mlp_bias"]
    experts = granite_experts(metadata)
    if "shared_intermediate_size" in experts:
        settings["model_type"] = "granitemoeshared"
    return {**settings, **experts}


def granite_hybrid(metadata: Metadata, shape: Shape) -> Settings:
    """Granite 4-H, with experts if the file has some."""
    settings = granitehybrid(metadata, shape)
    return settings | (granite_experts(metadata) if metadata.value("expert_count", 0) else {})


def granite_experts(metadata: Metadata) -> Settings:
    """The sizes of Granite's experts."""
    shared = "expert_shared_feed_forward_length"
    own = {"shared_intermediate_size": metadata.count(shared)} if metadata.has(shared) else {}
    return {
        **own,
        **local_experts(metadata),
        "intermediate_size": metadata.count("feed_forward_length"),
    }


def granite_shared(metadata: Metadata) -> Mapping[str, Joined]:
    """The parameters of Granite's feed-forward block that all tokens read.

    Beside experts it is an expert that is stored as such.
    """
    kind = "_shexp" if metadata.value("expert_count", 0) else ""
    return by_layer(
        {
            "shared_mlp.input_linear.weight": Joined.of_layer(
                f"ffn_gate{kind}.weight", f"ffn_up{kind}.weight", join=None
            ),
            "shared_mlp.output_linear.weight": Joined.of_layer(f"ffn_down{kind}.weight", join=None),
        }
    )
