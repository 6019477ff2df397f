"""Cases of Llama, which Mistral and Mixtral share."""

from __future__ import annotations

from collections.abc import Mapping

from .case import (
    BETAS,
    EXPERTS,
    LINEAR,
    LLAMA3,
    LONGROPE,
    QKV_BIAS,
    TIED,
    WINDOW,
    YARN,
    Case,
    case,
    factors,
    original,
)

_NO_QKV = {"blk.*.attn_q.weight": None, "blk.*.attn_k.weight": None, "blk.*.attn_v.weight": None}
_FUSED_QKV = {**_NO_QKV, "blk.*.attn_qkv.weight": (256, 128)}
_NO_FFN = {f"blk.*.ffn_{name}.weight": None for name in ("gate", "up", "down")}
_MIXTRAL = {
    **_NO_FFN,
    "blk.*.ffn_gate_inp.weight": (4, 128),
    "blk.*.ffn_gate_exps.weight": (4, 192, 128),
    "blk.*.ffn_up_exps.weight": (4, 192, 128),
    "blk.*.ffn_down_exps.weight": (4, 128, 192),
}

LLAMA: Mapping[str, Case] = {
    "llama": case("llama"),
    # Rotation.
    "llama, linear": case("llama", LINEAR),
    "llama, factor without type": case("llama", {"rope.scaling.factor": 4.0}),
    "llama, scale_linear": case("llama", {"rope.scale_linear": 4.0}),
    "llama, factor before scale_linear": case("llama", LINEAR, {"rope.scale_linear": 2.0}),
    "llama, type none": case("llama", LINEAR, {"rope.scaling.type": "none"}),
    "llama, linear, attn_factor": case("llama", LINEAR, {"rope.scaling.attn_factor": 1.3}),
    "llama, attn_factor": case("llama", {"rope.scaling.attn_factor": 1.3}),
    "llama, yarn": case("llama", YARN),
    "llama, yarn, original absent": case("llama", YARN, original(None)),
    "llama, yarn, attn_factor": case("llama", YARN, {"rope.scaling.attn_factor": 1.3}),
    "llama, yarn, betas": case("llama", YARN, BETAS),
    "llama, yarn, yarn_ext_factor": case("llama", YARN, {"rope.scaling.yarn_ext_factor": 0.5}),
    "llama, yarn, yarn_attn_factor": case("llama", YARN, {"rope.scaling.yarn_attn_factor": 1.3}),
    "llama, yarn, log multiplier": case("llama", YARN, {"rope.scaling.yarn_log_multiplier": 0.7}),
    "llama, yarn, factor 1": case("llama", YARN, {"rope.scaling.factor": 1.0}),
    "llama, rope_freqs": case("llama", tensors=LLAMA3),
    "llama, rope_freqs, linear": case("llama", LINEAR, tensors=LLAMA3),
    "llama, longrope, long": case("llama", LONGROPE, original(512), tensors=factors(16)),
    "llama, longrope, short": case("llama", LONGROPE, original(1024), tensors=factors(16)),
    "llama, longrope, original absent": case("llama", LONGROPE, tensors=factors(16)),
    "llama, longrope, attn_factor": case(
        "llama", LONGROPE, original(512), {"rope.scaling.attn_factor": 1.19}, tensors=factors(16)
    ),
    "llama, longrope, factor": case(
        "llama", LONGROPE, original(512), {"rope.scaling.factor": 2.0}, tensors=factors(16)
    ),
    "llama, longrope, no factors": case("llama", LONGROPE, original(512)),
    "llama, finetuned false": case("llama", {"rope.scaling.finetuned": False}),
    "llama, freq_base": case("llama", {"rope.freq_base": 500000.0}),
    "llama, freq_base absent": case("llama", {"rope.freq_base": None}),
    "llama, dimension_count absent": case("llama", {"rope.dimension_count": None}),
    "llama, dimension_count below key_length": case("llama", {"rope.dimension_count": 16}),
    "llama, unknown scaling type": case("llama", LINEAR, {"rope.scaling.type": "dynamic"}),
    # Sizes.
    "llama, key_length": case(
        "llama",
        {"attention.key_length": 48, "attention.value_length": 48, "rope.dimension_count": 48},
    ),
    "llama, key_length, dimension_count absent": case(
        "llama",
        {"attention.key_length": 48, "attention.value_length": 48, "rope.dimension_count": None},
    ),
    "llama, value_length above key_length": case("llama", {"attention.value_length": 48}),
    "llama, head_count_kv absent": case("llama", {"attention.head_count_kv": None}),
    "llama, feed_forward_length per layer": case("llama", {"feed_forward_length": [192, 192, 192]}),
    "llama, epsilon": case("llama", {"attention.layer_norm_rms_epsilon": 0.01}),
    # Head, scales, windows.
    "llama, tied": case("llama", tensors=TIED),
    "llama, attention.scale": case("llama", {"attention.scale": 0.1}),
    "llama, scales of granite": case(
        "llama", {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 3.0}
    ),
    "llama, softcaps": case(
        "llama", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}
    ),
    "llama, window": case("llama", WINDOW),
    "llama, window, pattern": case("llama", WINDOW, {"attention.sliding_window_pattern": 2}),
    "llama, named mistral": case("llama", WINDOW, {"general.name": "mistral"}),
    "llama, causal false": case("llama", {"attention.causal": False}),
    "llama, clamp and alibi": case(
        "llama", {"attention.clamp_kqv": 0.5, "attention.max_alibi_bias": 8.0}
    ),
    "llama, nextn_predict_layers": case("llama", {"nextn_predict_layers": 1}),
    # Tensors.
    "llama, qkv bias": case("llama", tensors=QKV_BIAS),
    "llama, attn_output bias": case("llama", tensors={"blk.*.attn_output.bias": (128,)}),
    "llama, ffn bias": case(
        "llama",
        tensors={
            "blk.*.ffn_gate.bias": (192,),
            "blk.*.ffn_up.bias": (192,),
            "blk.*.ffn_down.bias": (128,),
        },
    ),
    "llama, output bias": case("llama", tensors={"output.bias": (320,)}),
    "llama, fused qkv": case("llama", tensors=_FUSED_QKV),
    "llama, fused qkv, bias": case("llama", tensors={**_FUSED_QKV, "blk.*.attn_qkv.bias": (256,)}),
    "llama, fused qkv, separate bias": case("llama", tensors={**_FUSED_QKV, **QKV_BIAS}),
    "llama, tensor scales": case(
        "llama", tensors={"blk.*.attn_q.scale": [0.5], "blk.*.ffn_down.scale": [2.0]}
    ),
    "llama, q/k norm": case(
        "llama", tensors={"blk.*.attn_q_norm.weight": (32,), "blk.*.attn_k_norm.weight": (32,)}
    ),
    # Experts.
    "llama, experts": case("llama", EXPERTS, tensors=_MIXTRAL),
    "llama, experts, expert_weights_norm false": case(
        "llama", EXPERTS, {"expert_weights_norm": False}, tensors=_MIXTRAL
    ),
    "llama, experts, expert_weights_scale": case(
        "llama", EXPERTS, {"expert_weights_scale": 2.5}, tensors=_MIXTRAL
    ),
    "llama, experts, expert_gating_func sigmoid": case(
        "llama", EXPERTS, {"expert_gating_func": 2}, tensors=_MIXTRAL
    ),
    "llama, experts, expert_feed_forward_length": case(
        "llama", EXPERTS, {"expert_feed_forward_length": 96}, tensors=_MIXTRAL
    ),
    "llama, experts, groups": case(
        "llama", EXPERTS, {"expert_group_count": 2, "expert_group_used_count": 1}, tensors=_MIXTRAL
    ),
    "llama, expert_count 0": case("llama", {"expert_count": 0, "expert_used_count": 0}),
    "llama, experts, one used": case("llama", EXPERTS, {"expert_used_count": 1}, tensors=_MIXTRAL),
}
