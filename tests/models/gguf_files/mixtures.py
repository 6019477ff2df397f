"""Cases of architectures whose experts are chosen in their own way."""

from __future__ import annotations

from collections.abc import Mapping

from .case import EXPERTS, LINEAR, QKV_BIAS, TIED, YARN, Case, case, mtp

_GRANITE_SHARED = {
    "blk.*.ffn_gate_shexp.weight": (64, 128),
    "blk.*.ffn_up_shexp.weight": (64, 128),
    "blk.*.ffn_down_shexp.weight": (128, 64),
}
_HYBRID_EXPERTS = {
    **_GRANITE_SHARED,
    **dict.fromkeys(f"blk.*.ffn_{name}.weight" for name in ("gate", "up", "down")),
    "blk.*.ffn_gate_inp.weight": (4, 128),
    "blk.*.ffn_gate_exps.weight": (4, 192, 128),
    "blk.*.ffn_up_exps.weight": (4, 192, 128),
    "blk.*.ffn_down_exps.weight": (4, 128, 192),
}
_SHARED_WIDTH = {"expert_shared_feed_forward_length": 64}
_HEAD_NORMS = {"blk.*.attn_q_norm.weight": (32,), "blk.*.attn_k_norm.weight": (32,)}
_NO_CHOICE = {f"blk.{layer}.exp_probs_b.bias": None for layer in range(4)}
_QKV_BIAS_OF_ATTENTION = {
    "blk.2.attn_q.bias": (128,),
    "blk.2.attn_k.bias": (64,),
    "blk.2.attn_v.bias": (64,),
}
_LATENT_EXPERTS = {
    f"blk.{layer}.{name}.weight": shape
    for layer in (1, 3)
    for name, shape in {
        "ffn_up_exps": (4, 96, 64),
        "ffn_down_exps": (4, 64, 96),
        "ffn_latent_down": (64, 128),
        "ffn_latent_up": (128, 64),
    }.items()
}
_SOFTMAX = {"expert_gating_func": 1, "expert_weights_norm": None}
_OLD_SIZES = {
    "attention.head_count_kv": 4,
    "attention.key_length": 48,
    "attention.value_length": 24,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}
_OLD = {
    "blk.*.attn_k_b.weight": None,
    "blk.*.attn_v_b.weight": None,
    "blk.*.attn_kv_b.weight": (4 * (32 + 24), 64),
}
_DIRECT_QUERIES = {
    "blk.*.attn_q_a.weight": None,
    "blk.*.attn_q_a_norm.weight": None,
    "blk.*.attn_q_b.weight": None,
    "blk.*.attn_q.weight": (4 * 48, 128),
}

MIXTURES: Mapping[str, Case] = {
    "nemotron_h": case("nemotron_h"),
    "nemotron_h, epsilon": case("nemotron_h", {"attention.layer_norm_rms_epsilon": 1e-1}),
    "nemotron_h, other epsilon": case("nemotron_h", {"attention.layer_norm_epsilon": 1e-1}),
    "nemotron_h, qkv bias": case("nemotron_h", tensors=_QKV_BIAS_OF_ATTENTION),
    "nemotron_h_moe": case("nemotron_h_moe"),
    "nemotron_h_moe, weights as they are": case(
        "nemotron_h_moe", {"expert_weights_norm": None, "expert_weights_scale": None}
    ),
    "nemotron_h_moe, softmax": case("nemotron_h_moe", {"expert_gating_func": 1}),
    "nemotron_h_moe, latent": case(
        "nemotron_h_moe", {"moe_latent_size": 64}, tensors=_LATENT_EXPERTS
    ),
    "olmoe": case("olmoe"),
    "olmoe, expert_weights_norm": case("olmoe", {"expert_weights_norm": True}),
    "olmoe, expert_weights_scale": case("olmoe", {"expert_weights_scale": 2.5}),
    "olmoe, sigmoid": case("olmoe", {"expert_gating_func": 2}),
    "olmoe, one used": case("olmoe", {"expert_used_count": 1}),
    "lfm2moe": case("lfm2moe"),
    "lfm2moe, no dense layer": case("lfm2moe", {"leading_dense_block_count": 0}),
    "lfm2moe, softmax": case("lfm2moe", {"expert_gating_func": 1}),
    "lfm2moe, expert_weights_norm false": case("lfm2moe", {"expert_weights_norm": False}),
    "lfm2moe, expert_weights_scale": case("lfm2moe", {"expert_weights_scale": 2.5}),
    "minimax-m2": case("minimax-m2"),
    "minimax-m2, whole heads": case("minimax-m2", {"rope.dimension_count": 32}),
    "minimax-m2, yarn": case("minimax-m2", YARN),
    "minimax-m2, softmax": case("minimax-m2", {"expert_gating_func": 1}),
    "minimax-m2, expert_weights_scale": case("minimax-m2", {"expert_weights_scale": 2.5}),
    "minimax-m2, expert_weights_norm false": case("minimax-m2", {"expert_weights_norm": False}),
    "glm4moe": case("glm4moe"),
    "glm4moe, head norms": case("glm4moe", tensors=_HEAD_NORMS),
    "glm4moe, qkv bias": case("glm4moe", tensors=QKV_BIAS),
    "glm4moe, no dense layer": case("glm4moe", {"leading_dense_block_count": 0}),
    "glm4moe, weights as they are": case(
        "glm4moe", {"expert_weights_norm": None, "expert_weights_scale": None}
    ),
    "glm4moe, gating absent": case("glm4moe", {"expert_gating_func": None}),
    "glm4moe, softmax": case("glm4moe", {"expert_gating_func": 1}),
    "glm4moe, no bias of choice": case("glm4moe", tensors=_NO_CHOICE),
    "glm4moe, groups": case("glm4moe", {"expert_group_count": 2, "expert_group_used_count": 1}),
    "glm4moe, mtp": mtp("glm4moe", 4),
    "ernie4_5-moe": case("ernie4_5-moe"),
    "ernie4_5-moe, no dense layer": case("ernie4_5-moe", {"leading_dense_block_count": 0}),
    "ernie4_5-moe, expert_weights_scale": case("ernie4_5-moe", {"expert_weights_scale": 2.5}),
    "ernie4_5-moe, expert_weights_norm false": case("ernie4_5-moe", {"expert_weights_norm": False}),
    "ernie4_5-moe, sigmoid": case("ernie4_5-moe", {"expert_gating_func": 2}),
    "ernie4_5-moe, no bias of choice": case("ernie4_5-moe", tensors=_NO_CHOICE),
    "ernie4_5-moe, tied": case("ernie4_5-moe", tensors=TIED),
    "deepseek2": case("deepseek2"),
    "deepseek2, epsilon": case("deepseek2", {"attention.layer_norm_rms_epsilon": 1e-2}),
    "deepseek2, yarn": case("deepseek2", YARN),
    "deepseek2, yarn, multiplier": case(
        "deepseek2", YARN, {"rope.scaling.yarn_log_multiplier": 0.0707}
    ),
    "deepseek2, linear": case("deepseek2", LINEAR),
    "deepseek2, groups": case("deepseek2", {"expert_group_count": 2, "expert_group_used_count": 1}),
    "deepseek2, weights as they are": case(
        "deepseek2", {"expert_weights_norm": None, "expert_weights_scale": None}
    ),
    "deepseek2, softmax": case("deepseek2", _SOFTMAX, tensors=_NO_CHOICE),
    "deepseek2, softmax, bias of choice": case("deepseek2", _SOFTMAX),
    "deepseek2, softmax, normalised": case(
        "deepseek2", {"expert_gating_func": 1}, tensors=_NO_CHOICE
    ),
    "deepseek2, gating absent": case(
        "deepseek2", _SOFTMAX, {"expert_gating_func": None}, tensors=_NO_CHOICE
    ),
    "deepseek2, sizes of old files": case("deepseek2", _OLD_SIZES, tensors=_OLD),
    "deepseek2, 27 layers": case(
        "deepseek2", {"block_count": 27, "attention.q_lora_rank": None}, tensors=_DIRECT_QUERIES
    ),
    "granitemoe": case("granitemoe"),
    "granitemoe, shared": case("granitemoe", _SHARED_WIDTH, tensors=_GRANITE_SHARED),
    "granitemoe, expert_weights_norm false": case("granitemoe", {"expert_weights_norm": False}),
    "granitemoe, expert_weights_scale": case("granitemoe", {"expert_weights_scale": 2.5}),
    "granitemoe, sigmoid": case("granitemoe", {"expert_gating_func": 2}),
    "granitemoe, linear": case("granitemoe", LINEAR),
    "granitehybrid, experts": case(
        "granitehybrid", EXPERTS, _SHARED_WIDTH, tensors=_HYBRID_EXPERTS
    ),
}
