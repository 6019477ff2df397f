"""Settings of tiny models that the defaults and the general recipe do not get right.

All are by the model type of a configuration or of a part of one; by its class if it has no type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF_SECTIONS = {**_SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

# What the configuration is shrunk from, where the default has no layers of some kind.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 10,
        "rope_parameters": {"full_attention": _SECTIONS, "sliding_attention": _SECTIONS},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 31},
    # Their towers need the package timm.
    "fast_vlm": {"vision_config": {"model_type": "clip_vision_model"}},
    "perception_lm": {"vision_config": {"model_type": "clip_vision_model"}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_LAYER_INPUTS}},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8},
    "laguna": {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 10},
    "lfm2": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "mellum": {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "step3p5": {
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"] * 9
    },
}

# What replaces the small settings.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{
        name: {"pad_token_id": 1}
        for name in (
            "camembert",
            "data2vec-text",
            "kosmos_2_5_text_model",
            "kosmos_2_text_model",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
        )
    },
    **{
        name: {"rope_parameters": _SECTIONS}
        for name in (
            "glm4v_text",
            "glm_ocr_text",
            "paddleocr_vl_text",
            "qwen2_5_omni_text",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
        )
    },
    "glm4v_moe_text": {"rope_parameters": _HALF_SECTIONS},
    **{
        name: {"pad_token_id": 0, "global_head_dim": 32}
        for name in ("gemma4_text", "gemma4_unified_text")
    },
    **{
        name: {"base_channels": 32, "num_embeddings": 64, "embed_dim": 32, "latent_channels": 32}
        for name in ("chameleon_vqgan", "janus_vqgan")
    },
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 64},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "clip_vision_model": {"model_args": {"embed_dim": 64}},
    "chameleon": {"vocabulary_map": {"<image>": 99}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "diffusion_gemma_text": {
        "pad_token_id": 0,
        "global_head_dim": 32,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    },
    "dots1": {"n_shared_experts": 1, "moe_intermediate_size": 16},
    "dots3_note_text": {
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "emu3": {"vocabulary_map": {"<image>": 99, "<|extra_200|>": 98}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]},
    },
    "florence_vision": {
        "embed_dim": [16, 16, 16, 16],
        "num_heads": [2, 2, 2, 2],
        "num_groups": [2, 2, 2, 2],
        "depths": [1, 1, 1, 1],
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "1/2",
    },
    "hunyuan_vl_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [2, 2, 2, 2]}},
    "mamba2": {"num_heads": 8},
    "mimi": {"upsample_groups": 64},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 63},
    "prophetnet": {"pad_token_id": 0},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
        "eos_token_id": 2,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48]},
    "step3p5": {"sliding_window": 16},
    **{
        name: {"depths": [1, 1], "downsampling_ratios": [2], "num_filters": 16}
        for name in ("vibevoice_acoustic_tokenizer_encoder", "vibevoice_acoustic_tokenizer")
    },
    "xlm": {"pad_token_id": 2},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}

# Files with an empty dictionary that a model's folder must have.
FILES: Mapping[str, Sequence[str]] = {"qwen2_5_omni": ["spk_dict.pt"]}
