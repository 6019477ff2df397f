"""Cases of further architectures."""

from __future__ import annotations

from collections.abc import Mapping

from .case import (
    BETAS,
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
    mtp,
    original,
)

_GRANITE_SCALES = {"residual_scale": 0.5, "embedding_scale": 3.0, "attention.scale": 0.1}
# Heads of 16, so that the output projection is square.
_TINY = {
    "embedding_length": 64,
    "feed_forward_length": 64,
    "attention.key_length": 16,
    "attention.value_length": 16,
}
_TEMPERATURE = {"attention.temperature_scale": 0.3}

_NO_FUSED_QKV = {
    "blk.*.attn_qkv.weight": None,
    "blk.*.attn_q.weight": (128, 128),
    "blk.*.attn_k.weight": (64, 128),
    "blk.*.attn_v.weight": (64, 128),
}

OTHERS: Mapping[str, Case] = {
    "granitehybrid": case("granitehybrid"),
    "granitehybrid, scales": case("granitehybrid", _GRANITE_SCALES),
    "granitehybrid, no rotation": case("granitehybrid", {"rope.scaling.finetuned": False}),
    "lfm2": case("lfm2"),
    "lfm2, freq_base": case("lfm2", {"rope.freq_base": 1000000.0}),
    "lfm2, other layers": case("lfm2", {"attention.head_count_kv": [2, 0, 0, 2]}),
    "lfm2, head": case("lfm2", tensors={"output.weight": (320, 128)}),
    "phi3": case("phi3"),
    "phi3, partial": case("phi3", {"rope.dimension_count": 24}),
    "phi3, long": case("phi3", LONGROPE, original(512), tensors=factors(16)),
    "phi3, short": case("phi3", LONGROPE, original(2048), tensors=factors(16)),
    "phi3, partial, long, attn_factor": case(
        "phi3",
        LONGROPE,
        original(512),
        {"rope.dimension_count": 24, "rope.scaling.attn_factor": 1.19},
        tensors=factors(12),
    ),
    "phi3, factors without type": case("phi3", original(512), tensors=factors(16)),
    "phi3, window": case("phi3", WINDOW),
    "phi3, separate qkv": case("phi3", tensors=_NO_FUSED_QKV),
    "phi3, qkv bias": case("phi3", tensors={"blk.*.attn_qkv.bias": (256,)}),
    "phi3, tied": case("phi3", tensors=TIED),
    "mistral3": case("mistral3"),
    "mistral3, key_length": case(
        "mistral3",
        {"attention.key_length": 48, "attention.value_length": 48, "rope.dimension_count": 48},
    ),
    "mistral3, window": case("mistral3", WINDOW),
    "mistral3, yarn": case("mistral3", YARN),
    "mistral3, yarn, betas": case("mistral3", YARN, BETAS),
    "mistral3, yarn, log multiplier": case(
        "mistral3", YARN, {"rope.scaling.yarn_log_multiplier": 0.7}
    ),
    "mistral3, yarn, log multiplier 1": case(
        "mistral3", YARN, {"rope.scaling.yarn_log_multiplier": 1.0}
    ),
    "mistral3, temperature": case("mistral3", _TEMPERATURE, original(256)),
    "mistral3, temperature, original absent": case("mistral3", _TEMPERATURE),
    "mistral3, all": case(
        "mistral3", YARN, BETAS, _TEMPERATURE, {"rope.scaling.yarn_log_multiplier": 1.0}
    ),
    "mistral3, attention.scale": case("mistral3", {"attention.scale": 0.1}),
    "granite": case("granite"),
    "granite, logit_scale absent": case("granite", {"logit_scale": None}),
    "granite, residual_scale": case("granite", {"residual_scale": 0.5}),
    "granite, embedding_scale": case("granite", {"embedding_scale": 3.0}),
    "granite, attention.scale": case("granite", {"attention.scale": 0.1}),
    "granite, attention.scale 0": case("granite", {"attention.scale": 0.0}),
    "granite, all scales": case("granite", _GRANITE_SCALES),
    "granite, all scales, tied": case("granite", _GRANITE_SCALES, tensors=TIED),
    "granite, finetuned false": case("granite", {"rope.scaling.finetuned": False}),
    "granite, linear": case("granite", LINEAR),
    "granite, qkv bias": case("granite", tensors=QKV_BIAS),
    "smollm3": case("smollm3"),
    "smollm3, tied": case("smollm3", tensors=TIED),
    "smollm3, yarn": case("smollm3", YARN),
    "olmo2": case("olmo2"),
    "olmo2, tied": case("olmo2", tensors=TIED),
    "olmo2, yarn": case("olmo2", YARN),
    "olmo2, window": case("olmo2", WINDOW),
    "olmo2, window, pattern 2": case("olmo2", WINDOW, {"attention.sliding_window_pattern": 2}),
    "olmo2, window, linear": case("olmo2", WINDOW, LINEAR),
    "olmo2, window, yarn": case("olmo2", WINDOW, YARN),
    "olmo2, window, yarn, attn_factor": case(
        "olmo2", WINDOW, YARN, {"rope.scaling.attn_factor": 1.3}
    ),
    "olmo2, window, freq_base_swa": case("olmo2", WINDOW, {"rope.freq_base_swa": 100.0}),
    "gpt-oss": case("gpt-oss"),
    "gpt-oss, yarn": case("gpt-oss", YARN),
    "gpt-oss, pattern 3": case("gpt-oss", {"attention.sliding_window_pattern": 3}),
    "gpt-oss, window absent": case("gpt-oss", {"attention.sliding_window": None}),
    "gpt-oss, freq_base_swa": case("gpt-oss", {"rope.freq_base_swa": 100.0}),
    "gpt-oss, expert_weights_scale": case("gpt-oss", {"expert_weights_scale": 2.5}),
    "gpt-oss, no qkv bias": case("gpt-oss", tensors=dict.fromkeys(QKV_BIAS)),
    "gpt-oss, no sinks": case("gpt-oss", tensors={"blk.*.attn_sinks.weight": None}),
    "gpt-oss, tied": case("gpt-oss", tensors=TIED),
    "glm4": case("glm4"),
    "glm4, whole heads": case("glm4", {"rope.dimension_count": 32}),
    "glm4, qkv bias": case("glm4", tensors=QKV_BIAS),
    "glm4, mtp": mtp("glm4", 3),
    "exaone4": case("exaone4"),
    "exaone4, window": case("exaone4", WINDOW),
    "exaone4, 64 layers, window": case("exaone4", _TINY, {"block_count": 64}, WINDOW),
    "exaone4, rope_freqs": case("exaone4", tensors=LLAMA3),
    "exaone4, mtp": mtp("exaone4", 3),
    "seed_oss": case("seed_oss"),
    "seed_oss, qkv bias": case("seed_oss", tensors=QKV_BIAS),
    "hunyuan-dense": case("hunyuan-dense"),
    "hunyuan-dense, expert_count 1": case(
        "hunyuan-dense", {"expert_count": 1, "expert_used_count": 1}
    ),
    "hunyuan-dense, alpha": case("hunyuan-dense", {"rope.scaling.alpha": 8.0}),
    "ernie4_5": case("ernie4_5"),
    "stablelm": case("stablelm"),
    "stablelm, whole heads": case("stablelm", {"rope.dimension_count": 32}),
    "stablelm, qkv bias": case("stablelm", tensors=QKV_BIAS),
    "stablelm, parallel": case(
        "stablelm", tensors={"blk.*.ffn_norm.weight": None, "blk.*.ffn_norm.bias": None}
    ),
    "starcoder2": case("starcoder2"),
    "nemotron": case("nemotron"),
    "nemotron, whole heads": case("nemotron", {"rope.dimension_count": 32}),
    "falcon": case("falcon"),
    "gpt2": case("gpt2"),
    "bloom": case("bloom"),
}
