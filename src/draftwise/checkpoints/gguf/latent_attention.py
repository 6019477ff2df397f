"""DeepSeek-V2 and V3, and models of their kind: keys and values from a common latent vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.mixture_settings import routed_experts
from draftwise.checkpoints.gguf.parameter_names import Joined, by_layer
from draftwise.checkpoints.gguf.rotary import mscale
from draftwise.checkpoints.gguf.shared_settings import (
    Settings,
    Shape,
    attention_bias,
    has_tensors,
)

_SOFTMAX, _SIGMOID = 1, 2
# llama.cpp takes models of these numbers of layers for small ones, whose queries have no latent.
_LAYERS_WITHOUT_LATENT_QUERIES = (26, 27)
# Layers (with an MTP layer or without) and tokens of GLM-4.7-Flash, whose first files do not say
# that its experts have sigmoids.
_LAYERS_OF_GLM, _TOKENS_OF_GLM = (47, 48), 154880


def rotated_size(metadata: Metadata) -> int:
    """Numbers of a head that are rotated. They are all that the configuration calls a head."""
    return metadata.count("rope.dimension_count")


def deepseek2(metadata: Metadata, shape: Shape) -> Settings:
    """DeepSeek-V3's configuration where experts are scored by sigmoids, and V2's otherwise."""
    rotated = shape.head_size
    # Files of old converters have the sizes of heads; others have them under names of their own.
    names = [
        own if metadata.has(own) else old
        for own, old in (
            ("attention.key_length_mla", "attention.key_length"),
            ("attention.value_length_mla", "attention.value_length"),
        )
    ]
    key, value = map(metadata.count, names)
    if key <= rotated:
        raise metadata.refuse(names[0], f"{rotated} numbers of a head are rotated")
    metadata.ignore(
        ("attention.key_length", "attention.value_length", "attention.head_count_kv")
    )  # of the form that llama.cpp computes
    has_latent = metadata.num_layers not in _LAYERS_WITHOUT_LATENT_QUERIES
    settings = {
        **attention_bias(metadata),
        "num_key_value_heads": shape.heads,
        "q_lora_rank": metadata.count("attention.q_lora_rank") if has_latent else None,
        "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        **routed_experts(metadata),
        "rope_parameters": _rotary(metadata, shape),
    }
    metadata.ignore(("attention.q_lora_rank",))
    num_tokens = metadata.file.tensors["token_embd.weight"][0]
    is_glm = metadata.num_layers in _LAYERS_OF_GLM and num_tokens == _TOKENS_OF_GLM
    usual = _SIGMOID if is_glm else _SOFTMAX
    function = metadata.value("expert_gating_func", 0) or usual
    if function == _SIGMOID:
        return {**settings, "rope_interleave": True}
    if function != _SOFTMAX or settings["norm_topk_prob"]:
        name = "expert_gating_func" if function != _SOFTMAX else "expert_weights_norm"
        raise metadata.refuse(name, "experts of this architecture are not chosen in this way")
    return {**settings, "model_type": "deepseek_v2", "topk_method": "greedy"}


def _rotary(metadata: Metadata, shape: Shape) -> Settings:
    """The rotary embedding. With YaRN, scores grow, and without its multiplier, cosines too."""
    parameters = shape.rotary.parameters()
    multiplier = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    if parameters["rope_type"] == "yarn":
        parameters["mscale_all_dim"] = 10 * multiplier or 1.0
        if multiplier:
            parameters["attention_factor"] /= mscale(shape.rotary.factor)
    elif parameters["rope_type"] != "default":
        because = "positions of this architecture are only extended by 'yarn'"
        raise metadata.refuse("rope.scaling.type", because)
    return parameters


def keys_and_values(metadata: Metadata) -> Mapping[str, Joined]:
    """The projection of the latent vectors, of which files may have two parts."""
    if not has_tensors(metadata, "attn_k_b.weight"):
        return {}
    joined = Joined.of_layer("attn_k_b.weight", "attn_v_b.weight", join=_by_head)
    return by_layer({"self_attn.kv_b_proj.weight": joined})


def _by_head(keys: Tensor, values: Tensor) -> Tensor:
    """``[heads * (key + value), latent]`` of ``[heads, latent, key]`` and ``[…, value, latent]``.

    The numbers of a head follow each other.
    """
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def set_epsilons(model: Any) -> None:
    """Let the norms of latent vectors, if there are any, have the model's epsilon.

    So in llama.cpp. In transformers it is always 1e-6.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
