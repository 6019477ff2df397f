"""Writes the folder of a head in the layout of ``speculators``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftwise.checkpoints.heads.config import DraftHeadConfig

# Version of the layout that the configuration is written for.
_VERSION = "0.3.0"


def common_config(
    config: DraftHeadConfig,
    model_type: str,
    target: str,
    architectures: list[str],
    num_speculative_tokens: int,
) -> dict[str, Any]:
    """What the ``config.json`` of heads of all kinds contains.

    Args:
        config: the head's configuration.
        model_type: family of models whose layers it has.
        target: name of the target, which the layout calls the verifier.
        architectures: the target's architectures.
        num_speculative_tokens: draft length that the folder proposes.
    """
    return {
        "speculators_model_type": str(config.kind),
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": str(config.kind),
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": {
            "model_type": model_type,
            "vocab_size": config.target_vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_size,
            "hidden_act": config.activation,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": dict(config.rope_parameters),
            "rope_theta": config.rope_parameters.get("rope_theta"),
            "max_position_embeddings": config.max_position_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def head_tensors(
    weights: Mapping[str, Tensor], target_ids: Tensor, target_vocab_size: int
) -> dict[str, Tensor]:
    """The tensors of a folder.

    Args:
        weights: weights of the head by name.
        target_ids: ``[draft_vocab]`` the target's ids of the head's tokens.
        target_vocab_size: the target's number of tokens.

    Returns:
        The weights in bfloat16, ``d2t`` ``[draft_vocab]`` with the offset from each token to the
        target's, and ``t2d`` ``[target_vocab]``, which marks the target's tokens. A head of the
        whole vocabulary has neither, as vLLM refuses them there.
    """
    ids = target_ids.cpu()
    tensors = {
        name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()
    }
    if len(ids) == target_vocab_size:
        return tensors
    marked = torch.zeros(target_vocab_size, dtype=torch.bool)
    marked[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": marked}
