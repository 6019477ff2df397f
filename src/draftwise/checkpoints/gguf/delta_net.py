"""Qwen 3.5 and Qwen3-Next: layers of attention, and gated delta nets with fewer key heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.model_settings import qwen_experts
from draftwise.checkpoints.gguf.parameter_names import Joined, by_layer, of_channels
from draftwise.checkpoints.gguf.shared_settings import (
    Settings,
    Shape,
    attention_bias,
    has_tensors,
)


@dataclass(frozen=True)
class _Heads:
    """The heads of a gated delta net.

    Attributes:
        keys: key heads.
        values: value heads.
        key_size: numbers of a key.
        value_size: numbers of a value.
    """

    keys: int
    values: int
    key_size: int
    value_size: int

    @staticmethod
    def of(metadata: Metadata) -> _Heads:
        """What a file says.

        Raises:
            UnsupportedModelError: the value heads are no multiple of the key heads.
        """
        keys, values = metadata.count("ssm.group_count"), metadata.count("ssm.time_step_rank")
        inner = metadata.count("ssm.inner_size")
        if values % keys or inner % values:
            raise metadata.refuse("ssm.time_step_rank", "heads must be multiples of the key heads")
        return _Heads(keys, values, metadata.count("ssm.state_size"), inner // values)

    @property
    def repeats(self) -> int:
        """Value heads of a key head."""
        return self.values // self.keys


def qwen35(metadata: Metadata, shape: Shape) -> Settings:
    """Qwen 3.5: each layer but every fourth is a gated delta net."""
    # Of a text, all sections are rotated by the same position.
    pairs = shape.head_size // 2 if shape.rotary.divisors is None else len(shape.rotary.divisors)
    sections = metadata.value("rope.dimension_sections") or [pairs, 0, 0]
    return {
        **_layers(metadata, shape),
        "rope_parameters": {
            **shape.rotary.parameters(),
            "mrope_section": sections[:3],
            "mrope_interleaved": True,
        },
    }


def qwen35moe(metadata: Metadata, shape: Shape) -> Settings:
    """Qwen 3.5 with experts, of which one is shared."""
    experts = qwen_experts(metadata, True)
    own = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return {
        **qwen35(metadata, shape),
        **{name: experts[name] for name in own},
        "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
    }


def qwen3next(metadata: Metadata, shape: Shape) -> Settings:
    """Qwen3-Next: experts, of which one is shared, in layers as those of Qwen 3.5."""
    return {
        **_layers(metadata, shape),
        **qwen_experts(metadata, True),
        "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
    }


def _layers(metadata: Metadata, shape: Shape) -> Settings:
    """The kinds of layers, and their heads."""
    name = "attention.recurrent_layers"
    recurs = metadata.by_layer(name)
    if recurs is None:
        interval = metadata.count("full_attention_interval", 4)
        recurs = [(layer + 1) % interval > 0 for layer in range(shape.num_layers)]
    else:
        metadata.ignore(["full_attention_interval"])
    if not isinstance(recurs, list) or len(recurs) != shape.num_layers:
        raise metadata.refuse(name, f"it must be {shape.num_layers} booleans")
    heads = _Heads.of(metadata)
    return {
        **attention_bias(metadata),
        "num_key_value_heads": max(metadata.counts("attention.head_count_kv")),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurs],
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "linear_key_head_dim": heads.key_size,
        "linear_value_head_dim": heads.value_size,
        "linear_conv_kernel_dim": metadata.count("ssm.conv_kernel"),
    }


def in_turn(metadata: Metadata) -> dict[str, Joined]:
    """The parameters of Qwen 3.5's gated delta net.

    Files have the value heads in turn over the key heads, and models those of a key head together.
    """
    net = _Heads.of(metadata)
    heads = torch.arange(net.values).view(net.repeats, net.keys).T.flatten()
    values = (heads.unsqueeze(1) * net.value_size + torch.arange(net.value_size)).flatten()
    keys = 2 * net.keys * net.key_size
    mixed = torch.cat([torch.arange(keys), keys + values])
    of_layer, is_same = Joined.of_layer, net.repeats == 1

    def rows(tensor: str, order: Tensor) -> Joined:
        return of_layer(tensor, join=None, rows=None if is_same else order)

    return by_layer(
        {
            "linear_attn.in_proj_qkv.weight": rows("attn_qkv.weight", mixed),
            "linear_attn.in_proj_z.weight": rows("attn_gate.weight", values),
            "linear_attn.in_proj_b.weight": rows("ssm_beta.weight", heads),
            "linear_attn.in_proj_a.weight": rows("ssm_alpha.weight", heads),
            "linear_attn.conv1d.weight": of_layer(
                "ssm_conv1d.weight", join=lambda weight: of_channels(weight[mixed])
            ),
            "linear_attn.dt_bias": of_layer("ssm_dt.bias", join=lambda bias: bias[heads]),
            "linear_attn.A_log": of_layer("ssm_a", join=lambda a: torch.log(-a.flatten())[heads]),
            "linear_attn.norm.weight": of_layer("ssm_norm.weight"),
            "linear_attn.out_proj.weight": of_layer(
                "ssm_out.weight", join=None, pieces=None if is_same else heads
            ),
        }
    )


def in_groups(metadata: Metadata) -> dict[str, Joined]:
    """The parameters of Qwen3-Next's gated delta net.

    Models have queries, keys, values and gates of a key head together. Files have all queries, all
    keys and all values in one tensor and the gates in another one; old files are as the models.
    """
    net, of_layer = _Heads.of(metadata), Joined.of_layer
    keys, values = net.keys * net.key_size, net.values * net.value_size
    whole = torch.arange(2 * keys + 2 * values)
    parts = [each.view(net.keys, -1) for each in torch.split(whole, [keys, keys, values, values])]
    joined = of_layer(
        "attn_qkv.weight", "attn_gate.weight", join=None, rows=torch.cat(parts, 1).flatten()
    )
    if has_tensors(metadata, "ssm_in.weight"):
        joined = of_layer("ssm_in.weight", join=None)
    return by_layer(
        {
            "linear_attn.in_proj_qkvz.weight": joined,
            "linear_attn.in_proj_ba.weight": of_layer("ssm_ba.weight", join=None),
            "linear_attn.conv1d.weight": of_layer("ssm_conv1d.weight", join=of_channels),
            "linear_attn.dt_bias": of_layer("ssm_dt.bias"),
            "linear_attn.A_log": of_layer("ssm_a", join=lambda a: torch.log(-a.flatten())),
            "linear_attn.norm.weight": of_layer("ssm_norm.weight"),
            "linear_attn.out_proj.weight": of_layer("ssm_out.weight", join=None),
        }
    )
