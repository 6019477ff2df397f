"""Cases of Qwen 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping

from .case import LINEAR, LLAMA3, QKV_BIAS, TIED, WINDOW, YARN, Case, case, mtp

_IN_ONE = {
    "blk.*.attn_gate.weight": None,
    **{f"blk.{at}.attn_qkv.weight": None for at in range(3)},
    **{f"blk.{at}.ssm_in.weight": (384, 128) for at in range(3)},
}

QWEN: Mapping[str, Case] = {
    "qwen2": case("qwen2"),
    "qwen2, no bias": case("qwen2", tensors=dict.fromkeys(QKV_BIAS)),
    "qwen2, output bias": case("qwen2", tensors={"output.bias": (320,)}),
    "qwen2, tied": case("qwen2", tensors=TIED),
    "qwen2, linear": case("qwen2", LINEAR),
    "qwen2, yarn": case("qwen2", YARN),
    "qwen2, freq_base": case("qwen2", {"rope.freq_base": 1000000.0}),
    "qwen2, window": case("qwen2", WINDOW),
    "qwen2, rope_freqs": case("qwen2", tensors=LLAMA3),
    "qwen2, partial": case("qwen2", {"rope.dimension_count": 16}),
    "qwen2, key_length": case("qwen2", {"attention.key_length": 48, "attention.value_length": 48}),
    "qwen3": case("qwen3"),
    "qwen3, key_length absent": case(
        "qwen3", {"attention.key_length": None, "attention.value_length": None}
    ),
    "qwen3, key_length": case("qwen3", {"attention.key_length": 48, "attention.value_length": 48}),
    "qwen3, partial": case("qwen3", {"rope.dimension_count": 16}),
    "qwen3, yarn": case("qwen3", YARN),
    "qwen3, qkv bias": case("qwen3", tensors=QKV_BIAS),
    "qwen3, tied": case("qwen3", tensors=TIED),
    "qwen35": case("qwen35"),
    "qwen35, equal heads": case("qwen35", {"ssm.group_count": 4}),
    "qwen35, interval": case("qwen35", {"full_attention_interval": 4}),
    "qwen35, whole heads": case(
        "qwen35", {"rope.dimension_count": 32, "rope.dimension_sections": [6, 5, 5, 0]}
    ),
    "qwen35, tied": case("qwen35", tensors=TIED),
    "qwen35, mtp": mtp("qwen35", 8),
    "qwen35moe": case("qwen35moe"),
    "qwen35moe, mtp": mtp("qwen35moe", 8),
    "qwen3next": case("qwen3next"),
    "qwen3next, projections in one": case("qwen3next", tensors=_IN_ONE),
    "qwen3next, mtp": mtp("qwen3next", 8),
    "qwen2moe": case("qwen2moe"),
    "qwen2moe, expert widths absent": case(
        "qwen2moe", {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    ),
    "qwen2moe, expert_weights_norm": case("qwen2moe", {"expert_weights_norm": True}),
    "qwen2moe, expert_weights_scale": case("qwen2moe", {"expert_weights_scale": 2.5}),
    "qwen2moe, tied": case("qwen2moe", tensors=TIED),
    "qwen3moe": case("qwen3moe"),
    "qwen3moe, expert width absent": case("qwen3moe", {"expert_feed_forward_length": None}),
    "qwen3moe, expert_weights_norm false": case("qwen3moe", {"expert_weights_norm": False}),
    "qwen3moe, expert_weights_scale": case("qwen3moe", {"expert_weights_scale": 2.5}),
    "qwen3moe, leading dense and shared": case(
        "qwen3moe", {"leading_dense_block_count": 1, "expert_shared_count": 1}
    ),
    "qwen3moe, expert groups": case(
        "qwen3moe", {"expert_group_count": 2, "expert_group_used_count": 1}
    ),
    "qwen3moe, tied": case("qwen3moe", tensors=TIED),
}
