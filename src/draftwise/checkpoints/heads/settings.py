"""Readers of single settings in the configuration of a drafting head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.checkpoints.rotary import depends_on_length
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
_DEFAULT_EPSILON = 1e-6
_DEFAULT_THETA = 10_000.0
_DEFAULT_CONTEXT = 2048


def object_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of a configuration; ``None`` in the file stands for an empty one."""
    value = config.get(name)
    if not isinstance(value, Mapping | None):
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be an object, got {value!r}"
        )
    return value or {}


def list_of(config: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A list of a configuration; ``None`` in the file stands for an empty one."""
    value = config.get(name)
    if not isinstance(value, list | tuple | None):
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be a list, got {value!r}"
        )
    return value or ()


def size_of(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer of a configuration; ``None`` in the file stands for the default."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(_ROLE, f"config.json of the head has no {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be a positive integer, got {value!r}"
        )
    return value


def number_of(config: Mapping[str, Any], name: str, default: float) -> float:
    """A positive, finite number; ``None`` in the file stands for the default."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be a positive number, got {value!r}"
        )
    return float(value)


def rope_parameters(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Type, base and parameters of the rotary embedding, from the older or the newer keys."""
    found = dict(object_of(layer, "rope_parameters") or object_of(layer, "rope_scaling"))
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", number_of(layer, "rope_theta", _DEFAULT_THETA))
    if depends_on_length(found):
        raise UnsupportedModelError(
            _ROLE,
            f"the head's position scaling {found['rope_type']!r} depends on the length of the text",
        )
    return found


def attention_windows(layer: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer."""
    types = list_of(layer, "layer_types") or ["full_attention"] * num_layers
    windows: list[int | None] = []
    for kind in types[:num_layers]:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(_ROLE, f"the head's attention is {kind!r}")
        windows.append(size_of(layer, "sliding_window") if kind == "sliding_attention" else None)
    if len(windows) < num_layers:
        raise UnsupportedModelError(
            _ROLE, f"layer_types names {len(windows)} of the head's {num_layers} layers"
        )
    return tuple(windows)


def layer_settings(layer: Mapping[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """What heads of all kinds read from the configuration of their layers.

    Args:
        layer: the configuration.
        types: families of models whose layers are supported.

    Raises:
        UnsupportedModelError: a setting is missing or invalid. The error names it.
    """
    family = layer.get("model_type", "llama")
    if family not in types:
        raise UnsupportedModelError(
            _ROLE, f"the head's layer is of type {family!r}; supported are {', '.join(types)}"
        )
    hidden_size, num_heads = size_of(layer, "hidden_size"), size_of(layer, "num_attention_heads")
    num_kv_heads = size_of(layer, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            _ROLE,
            f"num_attention_heads in config.json of the head, {num_heads}, must be a multiple of "
            f"num_key_value_heads, {num_kv_heads}",
        )
    return {
        "hidden_size": hidden_size,
        "target_vocab_size": size_of(layer, "vocab_size"),
        "intermediate_size": size_of(layer, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": size_of(layer, "head_dim", hidden_size // num_heads),
        "activation": str(layer.get("hidden_act", "silu")),
        "rms_norm_eps": number_of(layer, "rms_norm_eps", _DEFAULT_EPSILON),
        "rope_parameters": rope_parameters(layer),
        "max_position_embeddings": size_of(layer, "max_position_embeddings", _DEFAULT_CONTEXT),
    }
