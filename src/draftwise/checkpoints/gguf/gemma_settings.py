"""Configurations of Gemma 1 to 4 from the metadata of GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.rotary import FREQUENCIES, UNROTATED
from draftwise.checkpoints.gguf.shared_settings import (
    Settings,
    Shape,
    experts_settings,
    layer_types,
    same_base,
)


def _gemma_scale(metadata: Metadata, shape: Shape, largest: int) -> Settings:
    """Scores are divided by a root, which the largest model of a generation chooses otherwise."""
    is_largest = shape.num_layers == largest
    return {
        "query_pre_attn_scalar": shape.hidden // shape.heads if is_largest else shape.head_size,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def gemma(metadata: Metadata, shape: Shape) -> Settings:
    """Gemma 1: nothing but its activation."""
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def gemma2(metadata: Metadata, shape: Shape) -> Settings:
    """Gemma 2: soft caps, and a window in every second layer."""
    same_base(metadata, shape)
    cap = metadata.number("attn_logit_softcapping", 50.0)
    if cap <= 0:
        raise metadata.refuse("attn_logit_softcapping", "it must be positive")
    return {
        **_gemma_scale(metadata, shape, 46),
        "attn_logit_softcapping": cap,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": metadata.count("attention.sliding_window", 4096),
        "layer_types": layer_types(metadata, shape, 2),
    }


def gemma3(metadata: Metadata, shape: Shape) -> Settings:
    """Gemma 3: windows if the file has one, with a rotary embedding of their own."""
    sliding = shape.rotary.unscaled(metadata.number("rope.freq_base_swa", 10000.0))
    if metadata.value("attention.sliding_window", 0):
        window = metadata.count("attention.sliding_window")
        types = layer_types(metadata, shape, 6)
    else:
        metadata.ignore(["attention.sliding_window_pattern"])
        window, types = metadata.count("context_length"), ["full_attention"] * shape.num_layers
    return {
        **_gemma_scale(metadata, shape, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": types,
        "rope_parameters": {
            "full_attention": shape.rotary.parameters(),
            "sliding_attention": sliding.parameters(),
        },
    }


def gemma4(metadata: Metadata, shape: Shape) -> Settings:
    """Gemma 4: head sizes by type of layer, per-layer inputs, shared keys, experts."""
    size = metadata.count("attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.require(name, size, because=f"it must equal attention.key_length_swa, {size}")
    if metadata.value("rope.dimension_count_swa") is None:
        raise metadata.refuse("rope.dimension_count_swa", "it is needed")
    if FREQUENCIES not in metadata.file.tensors:
        raise metadata.file.error(f"has no tensor {FREQUENCIES!r}")
    rotary = shape.rotary
    divisors = rotary.divisors or ()
    rotated = divisors.count(1.0)
    if divisors[:rotated] != (1.0,) * rotated or min(divisors[rotated:], default=inf) < UNROTATED:
        raise metadata.file.error(
            f"has other numbers than 1 and 1e30 in the tensor {FREQUENCIES!r}, which is not "
            "supported"
        )
    if rotary.factor != 1 or rotary.attention != 1:
        raise metadata.refuse("rope.scaling.factor", "scaled positions are not supported")
    base = metadata.number("rope.freq_base_swa", 10000.0)
    settings: Settings = {
        "head_dim": size,
        "global_head_dim": shape.head_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": layer_types(metadata, shape, None),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0) or None,
        "num_kv_shared_layers": _shared_layers(metadata),
        **_gemma4_heads(metadata, shape),
        **_gemma4_width(metadata, shape),
        "hidden_size_per_layer_input": int(metadata.number("embedding_length_per_layer_input")),
        "vocab_size_per_layer_input": metadata.file.tensors["token_embd.weight"][0],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": rotary.base,
                "partial_rotary_factor": rotated / len(divisors),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }
    if settings["layer_types"][-1] != "full_attention":
        raise metadata.refuse("attention.sliding_window_pattern", "the last layer must not slide")
    if metadata.value("expert_count", 0):
        experts = experts_settings(metadata)
        settings |= {
            "enable_moe_block": True,
            "num_experts": experts["num_experts"],
            "top_k_experts": experts["num_experts_per_tok"],
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        }
    return settings


def _shared_layers(metadata: Metadata) -> int:
    """The number of last layers that use the keys and values of others."""
    name = "attention.shared_kv_layers"
    return metadata.count(name) if metadata.value(name, 0) else 0


def unused_by_shared_layers(metadata: Metadata) -> Iterable[str]:
    """Names of the tensors of keys and values in layers that use those of others."""
    last = metadata.count("block_count")
    for layer in range(last - _shared_layers(metadata), last):
        for tensor in ("attn_k", "attn_v", "attn_k_norm"):
            yield f"blk.{layer}.{tensor}.weight"


def _gemma4_width(metadata: Metadata, shape: Shape) -> Settings:
    """Feed-forward blocks have the same width, or twice that in layers that share keys."""
    name = "feed_forward_length"
    found, shared = metadata.value(name), _shared_layers(metadata)
    if not isinstance(found, list) or len(found) != shape.num_layers or not shared:
        return {"intermediate_size": metadata.count(name)}
    own = shape.num_layers - shared
    if found == [found[0]] * own + [2 * found[0]] * shared:
        return {"intermediate_size": found[0], "use_double_wide_mlp": True}
    return {"intermediate_size": metadata.count(name)}


def _gemma4_heads(metadata: Metadata, shape: Shape) -> Settings:
    """Key-value heads of layers with and without a window, and whether the latter have values."""
    name = "attention.head_count_kv"
    found = metadata.value(name, shape.heads)
    heads = found if isinstance(found, list) else [found] * shape.num_layers
    slides = [each == "sliding_attention" for each in layer_types(metadata, shape, None)]
    by_type = {
        kind: {count for count, each in zip(heads, slides, strict=False) if each is kind}
        for kind in (True, False)
    }
    if len(heads) != shape.num_layers or any(len(each) > 1 for each in by_type.values()):
        raise metadata.refuse(name, "layers of the same type that differ in it are not supported")
    first = slides.index(False) if False in slides else 0
    own_values = f"blk.{first}.attn_v.weight" in metadata.file.tensors
    full = by_type[False].pop() if by_type[False] else shape.heads
    sliding = by_type[True].pop() if by_type[True] else full
    if own_values and sliding != full:
        raise metadata.refuse(name, "layers that differ in it must use their keys as values")
    return {
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": not own_values,
    }
