"""Cases of Gemma 1 to 4."""

from __future__ import annotations

from collections.abc import Mapping

from .case import EXPERTS, LINEAR, WINDOW, YARN, Case, case

_NO_PER_LAYER_INPUT = dict.fromkeys(
    (
        "per_layer_token_embd.weight",
        "per_layer_model_proj.weight",
        "per_layer_proj_norm.weight",
        "blk.*.inp_gate.weight",
        "blk.*.proj.weight",
        "blk.*.post_norm.weight",
    )
)
_GEMMA4_EXPERTS = {
    "blk.*.ffn_gate_inp.weight": (4, 128),
    "blk.*.ffn_gate_inp.scale": (128,),
    "blk.*.ffn_gate_up_exps.weight": (4, 192, 128),
    "blk.*.ffn_down_exps.weight": (4, 128, 96),
    "blk.*.ffn_down_exps.scale": [0.5, 1.0, 1.5, 2.0],
    "blk.*.pre_ffw_norm_2.weight": (128,),
    "blk.*.post_ffw_norm_1.weight": (128,),
    "blk.*.post_ffw_norm_2.weight": (128,),
}

_TINY = {"embedding_length": 64, "feed_forward_length": 64, "rope.freq_base": None}

GEMMA: Mapping[str, Case] = {
    "gemma": case("gemma"),
    "gemma2": case("gemma2"),
    "gemma2, caps": case("gemma2", {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0}),
    "gemma2, window": case("gemma2", WINDOW),
    "gemma2, window, pattern 3": case("gemma2", WINDOW, {"attention.sliding_window_pattern": 3}),
    "gemma2, window, linear": case("gemma2", WINDOW, LINEAR),
    "gemma2, window, freq_base_swa": case("gemma2", WINDOW, {"rope.freq_base_swa": 100.0}),
    "gemma2, 46 layers": case(
        "gemma2", _TINY, {"block_count": 46, "attention.head_count": 4, **WINDOW}
    ),
    "gemma3": case("gemma3"),
    "gemma3, window": case("gemma3", WINDOW),
    "gemma3, window 0": case("gemma3", {"attention.sliding_window": 0}),
    "gemma3, window, pattern 3": case("gemma3", WINDOW, {"attention.sliding_window_pattern": 3}),
    "gemma3, window, pattern of booleans": case(
        "gemma3",
        WINDOW,
        {"attention.sliding_window_pattern": [True, False, False, True, True, False]},
    ),
    "gemma3, linear": case("gemma3", LINEAR, {"rope.scaling.factor": 8.0}),
    "gemma3, window, linear": case("gemma3", WINDOW, LINEAR, {"rope.scaling.factor": 8.0}),
    "gemma3, window, yarn": case("gemma3", WINDOW, YARN),
    "gemma3, window, freq_base": case("gemma3", WINDOW, {"rope.freq_base": 1000000.0}),
    "gemma3, window, freq_base_swa": case("gemma3", WINDOW, {"rope.freq_base_swa": 100.0}),
    "gemma3, partial": case("gemma3", {"rope.dimension_count": 16}),
    "gemma3, final cap": case("gemma3", {"final_logit_softcapping": 5.0}),
    "gemma3, attention cap": case("gemma3", {"attn_logit_softcapping": 4.0}),
    "gemma3, attention.scale": case("gemma3", {"attention.scale": 0.1}),
    "gemma3, 62 layers": case("gemma3", _TINY, {"block_count": 62}),
    "gemma3, untied": case("gemma3", tensors={"output.weight": (320, 128)}),
    "gemma4": case("gemma4"),
    "gemma4, final cap": case("gemma4", {"final_logit_softcapping": 5.0}),
    "gemma4, freq_base_swa absent": case("gemma4", {"rope.freq_base_swa": None}),
    "gemma4, pattern absent": case("gemma4", {"attention.sliding_window_pattern": None}),
    "gemma4, window absent": case("gemma4", {"attention.sliding_window": None}),
    "gemma4, dimension_count_swa absent": case("gemma4", {"rope.dimension_count_swa": None}),
    "gemma4, shared layers": case("gemma4", {"attention.shared_kv_layers": 2}),
    "gemma4, shared layers without their tensors": case(
        "gemma4",
        {"attention.shared_kv_layers": 2},
        tensors={
            f"blk.{layer}.attn_{name}.weight": None
            for layer in (2, 3)
            for name in ("k", "v", "k_norm")
        },
    ),
    "gemma4, shared layers of twice the width": case(
        "gemma4", {"attention.shared_kv_layers": 2, "feed_forward_length": [192, 192, 384, 384]}
    ),
    "gemma4, no per-layer input": case(
        "gemma4", {"embedding_length_per_layer_input": 0}, tensors=_NO_PER_LAYER_INPUT
    ),
    "gemma4, values are keys": case(
        "gemma4", tensors={"blk.1.attn_v.weight": None, "blk.3.attn_v.weight": None}
    ),
    "gemma4, no layer_output_scale": case(
        "gemma4", tensors={"blk.*.layer_output_scale.weight": None}
    ),
    "gemma4, widths and kv heads per layer": case(
        "gemma4",
        {"feed_forward_length": [192, 192, 256, 256], "attention.head_count_kv": [2, 1, 2, 1]},
    ),
    "gemma4, no rope_freqs": case("gemma4", tensors={"rope_freqs.weight": None}),
    "gemma4, experts": case(
        "gemma4", EXPERTS, {"expert_feed_forward_length": 96}, tensors=_GEMMA4_EXPERTS
    ),
}
