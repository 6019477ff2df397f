"""The keys of configurations of heads that draft blocks, in two of their layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The type of a head in the layout of ``speculators``.
IN_SPECULATORS = "speculators_model_type"
OF_DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Keys of ``dflash_config`` that are read. Any other one may change what is computed.
DFLASH_KEYS = frozenset(
    {
        *OF_DFLASH_2,
        "block_size",
        "causal",
        "final_logit_softcapping",
        "input_embedding_scale",
        "mask_token_id",
        "output_multiplier",
        "target_layer_ids",
    }
)
# Keys of ``speculators`` that are read, and those of training and of the file itself.
SPECULATORS_KEYS = frozenset(
    {
        IN_SPECULATORS,
        *OF_DFLASH_2,
        "architectures",
        "aux_hidden_state_layer_ids",
        "block_size",
        "confidence_head_with_markov",
        "confidence_temperatures",
        "draft_vocab_size",
        "enable_confidence_head",
        "markov_head_type",
        "markov_rank",
        "mask_token_id",
        "pure_draft_prefix_len",
        "projector_type",
        "sample_from_anchor",
        "shift_label",
        "sliding_window_non_causal",
        "speculators_config",
        "target_hidden_size",
        "transformer_layer_config",
        # Of the file.
        "auto_map",
        "has_no_defaults_at_init",
        "dtype",
        "speculators_version",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        # Of training.
        "auf",
        "ce_loss_alpha",
        "confidence_head_alpha",
        "draft_ffn_type",
        "emb_dim",
        "embed_requires_grad",
        "gru_hidden_dim",
        "l1_loss_alpha",
        "lambda_base_decay_ratio",
        "lambda_base_start",
        "loss_decay_gamma",
        "max_anchors",
        "moe_experts_implementation",
        "moe_intermediate_size",
        "num_anchors",
        "num_experts",
        "num_experts_per_tok",
        "shared_expert_intermediate_size",
    }
)
# Settings of variants that compute something else, and the only value that is supported.
OF_VARIANTS: Mapping[str, Any] = {
    "projector_type": "dflash",
    "shift_label": False,
    "draft_ffn_type": "dense",
    "use_heterogeneous_kv": False,
}
