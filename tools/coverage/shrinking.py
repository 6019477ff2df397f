"""Tiny configurations of any architecture, derived from the defaults of its configuration class.

Sizes are chosen by the names of settings. Of the layers, a few are kept in which every kind of
layer occurs. What that does not get right is listed in ``overrides.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from .layers import fewer_layers, value_of
from .overrides import DEFAULTS, SETTINGS

VOCAB = 64
CONTEXT = 128
# Longer than the texts by which Draftwise checks a model at load, so that it does not see what is
# different beyond. Prompts and continuations are longer than this.
WINDOW = 16
HIDDEN, HEADS, HEAD, INNER = 64, 4, 16, 96

# The first expression that is found in the name of an integer decides about its value. A function
# gets the default.
_SIZES: Sequence[tuple[str, int | Callable[[int], int]]] = [
    (r"^(num_mel_bins|num_channels|in_channels|audio_channels)$", lambda size: size),
    (r"vocab_size", lambda size: min(size, VOCAB)),
    (r"^(max_(position_embeddings|seq_len|target_positions)|n_positions|n_ctx)$", CONTEXT),
    (r"^(seq_length|context_length|model_max_length)$", CONTEXT),
    (r"floor", WINDOW),
    (r"window(_size|_len)?$|^attention_chunk_size$|^local_attention$", WINDOW),
    (r"^(block_size|mamba_chunk_size|chunk_size|index_topk)$", lambda size: min(size, WINDOW)),
    (r"^index_(block_size|kpool|topk_blocks)$", 4),
    (r"n_?groups?$|^num_expert_group$", lambda size: min(size, 2)),
    (r"^topk_group$", 1),
    (r"experts_per_tok|^moe_(k|top_?k)$|^top_k", lambda size: min(size, 2)),
    (r"shared_experts?$", lambda size: min(size, 1)),
    (r"shared.*intermediate_size$", lambda size: min(size, 16)),
    (r"experts$|^zero_expert_num$", 8),
    (r"(mamba|ssm).*heads$", 2 * HEADS),
    (r"d_ssm$", 2 * HIDDEN),
    (r"^(index_n_heads|linear_num_key_heads)$", 2),
    (r"heads$|^n_head$|^num_query_groups$", HEADS),
    (r"^qk_head_dim$", 2 * HEAD),
    (r"head_?dim$|dim_head$|^d_(head|kv)$|head_size$|^kv_channels$|_d_head$", HEAD),
    (r"rotary_dim$|rope_head_dim$|^query_pre_attn_scalar$", HEAD),
    (r"_rank$|_lowrank$", 8),
    (r"state(_size)?$", 8),
    (r"moe_intermediate_size|expert_ffn_hidden_size|expert_dim$", 16),
    (r"intermediate_size|ffn_dim|^d_ff|^dff$|dim_ff$|mlp_dim$|ffn_hidden_size|feed_forward", INNER),
    (r"layers?$|layers_per_stack$|^depth$|num_blocks$", lambda size: min(size, 2)),
    (r"hidden_size_per_layer_input", lambda size: min(size, 8)),
    (
        r"hidden_size|hidden_dim|^d_model|n_embd|embed(ding)?_(dim|size)|hidden$|^projection_dim$"
        r"|output_dim$|^emb_dim$|lru_width|d_inner|_dim$|^dim$|embed_dim|_channels?$|adapter_in",
        HIDDEN,
    ),
    (r"num_position_embeddings", 16),
]
# What a model needs although its default is nothing.
_NEEDED = {
    "head_dim": HEAD,
    "num_key_value_heads": HEADS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
}
# In names of lists with a size for each layer.
_UNITS = {"intermediate_size": INNER, "hidden_size": HIDDEN, "heads": HEADS}
_KEY_HEADS = re.compile(r"key_value_heads$|kv_heads$|kv_n_heads$")
# Every nth layer is of another kind.
_PERIODS = re.compile(r"(period|interval|every_n_layers|_pattern|sparse_step|layer_step)$")
_OFFSETS = re.compile(r"layer_offset$")
_TOKENS = re.compile(r"token_ids?$|token_index$|^(bos|eos|eod|boi|eoi|image|im)_.*(id|index)$")
_OF_EVERY_CONFIG = {field.name for field in fields(PreTrainedConfig)}


def tiny_config(kind: type[PreTrainedConfig], default: PreTrainedConfig | None = None) -> Any:
    """A configuration with small sizes.

    Args:
        kind: the class of the configuration.
        default: the configuration to shrink; ``None`` for that of the class.
    """
    key = kind.model_type or kind.__name__
    plain = kind(**DEFAULTS.get(key, {}))
    if default is None or key in DEFAULTS:
        default = plain
    types = {each.name: str(each.type) for each in fields(kind)}
    names = [name for name in types if name not in _OF_EVERY_CONFIG]
    small = {name: _shrink(name, value_of(default, name), default) for name in names}
    small |= {name: _of_layers(name, each) for name, each in fewer_layers(default, names).items()}
    settings = {
        name: value
        for name, value in small.items()
        if isinstance(value, PreTrainedConfig)
        or name in DEFAULTS.get(key, {})
        or value != value_of(plain, name)
    }
    for token, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        settings[name] = None if "None" in types.get(name, "None") else token
    if "is_decoder" in types and not default.is_encoder_decoder:
        settings["is_decoder"] = True
    return kind(**{**settings, **SETTINGS.get(key, {})})


def _of_layers(name: str, value: Any) -> Any:
    """Sizes of each layer, as different from each other as they were."""
    unit = next((size for part, size in _UNITS.items() if part in name), None)
    if unit is None or not isinstance(value, list):
        return value
    sizes = sorted(set(value))
    return [unit * (1 + sizes.index(each)) for each in value]


def _shrink(name: str, value: Any, config: PreTrainedConfig) -> Any:
    if isinstance(value, PreTrainedConfig):
        return tiny_config(type(value), value)
    if name == "rope_parameters" and isinstance(value, dict):
        return _shrink_rope(value)
    if value is None and name in _NEEDED:
        return _NEEDED[name]
    if isinstance(value, bool) or not isinstance(value, int) or value == 0:
        return value
    if _TOKENS.search(name):
        # No text contains tokens that stand for images and sounds.
        return VOCAB + sum(map(ord, name)) % 1000
    if _KEY_HEADS.search(name):
        heads = value_of(config, "num_attention_heads")
        return 1 if value == 1 else HEADS if value == heads else HEADS // 2
    if _PERIODS.search(name):
        return min(value, 2)
    if _OFFSETS.search(name):
        return min(value, 1)
    for pattern, size in _SIZES:
        if re.search(pattern, name):
            return size(value) if callable(size) else size
    return value


def _shrink_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of rotary positions, perhaps one set per kind of layer."""
    if any(isinstance(each, dict) for each in rope.values()):
        return {name: each and _shrink_rope(each) for name, each in rope.items()}
    small = dict(rope)
    # Half of the rotated dimensions of a head.
    half = max(1, int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2)
    for name in ("mrope_section", "xdrope_section"):
        if isinstance(rope.get(name), list | tuple):
            small[name] = _shares(half, rope[name])
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list | tuple):
            small[name] = list(rope[name])[:half]
    if "original_max_position_embeddings" in rope:
        # These two change with the longest text of a batch beyond it, the others by the position.
        changes = rope.get("rope_type") in ("dynamic", "longrope")
        small["original_max_position_embeddings"] = CONTEXT if changes else 2 * WINDOW
    return small


def _shares(total: int, parts: Sequence[int]) -> list[int]:
    """Split a number in about the proportions of the parts, each at least 1 if there are enough."""
    shares = [max(1, total * part // sum(parts)) for part in parts]
    shares[0] += total - sum(shares)
    return shares
