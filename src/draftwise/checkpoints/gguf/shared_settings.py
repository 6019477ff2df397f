"""What architectures of GGUF files have in common in their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.rotary import Rotary

Settings = dict[str, Any]
_NO_WINDOW = "llama.cpp attends to the whole context in this architecture"
WINDOWS: Mapping[str, str] = {
    "attention.sliding_window": _NO_WINDOW,
    "attention.sliding_window_pattern": _NO_WINDOW,
}


@dataclass(frozen=True)
class Shape:
    """What all architectures have.

    Attributes:
        hidden: size of the residual stream.
        num_layers: layers.
        heads: query heads.
        head_size: size of a head.
        rotary: the rotary embedding.
    """

    hidden: int
    num_layers: int
    heads: int
    head_size: int
    rotary: Rotary


def has_tensors(metadata: Metadata, *parts: str) -> bool:
    """Whether any layer has one of some tensors."""
    return any(name.split(".", 2)[-1] in parts for name in metadata.file.tensors)


def attention_bias(metadata: Metadata) -> Settings:
    """Whether any attention projection has a bias."""
    parts = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias", "attn_output.bias")
    return {"attention_bias": has_tensors(metadata, *parts)}


def biases(metadata: Metadata, shape: Shape) -> Settings:
    """Whether any attention projection, and any of the feed-forward block, has a bias."""
    mlp = has_tensors(metadata, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
    return {**attention_bias(metadata), "mlp_bias": mlp}


def layer_types(metadata: Metadata, shape: Shape, period: int | None) -> list[str]:
    """Which layers have a window: an array of booleans, or all but each ``period``-th layer."""
    name = "attention.sliding_window_pattern"
    found = metadata.by_layer(name, period)
    if isinstance(found, list):
        slides = found
    elif isinstance(found, int) and found > 0:
        slides = [layer % found < found - 1 for layer in range(shape.num_layers)]
    else:
        slides = []
    if len(slides) != shape.num_layers:
        raise metadata.refuse(name, f"it must be a period or {shape.num_layers} booleans")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def no_window(metadata: Metadata, shape: Shape) -> Settings:
    """All layers attend to the whole context."""
    return {"sliding_window": None, "use_sliding_window": False}


def same_base(metadata: Metadata, shape: Shape) -> None:
    """Refuse another rotary base for sliding layers."""
    base = shape.rotary.base
    metadata.require("rope.freq_base_swa", base, because=f"it must equal rope.freq_base, {base}")


def local_experts(metadata: Metadata) -> Settings:
    """The same as :func:`experts_settings`, by Mixtral's names."""
    experts = experts_settings(metadata)
    return {
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
    }


def experts_settings(metadata: Metadata) -> Settings:
    """Number of experts and of those that each token chooses, without groups."""
    if metadata.value("expert_group_count", 0) not in (0, 1):
        raise metadata.refuse("expert_group_count", "groups of experts are not supported")
    metadata.ignore(["expert_group_used_count"])
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
    }
