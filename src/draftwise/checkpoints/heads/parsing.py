"""Reading of the configuration of a drafting head, and recognition of one."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftwise.checkpoints.heads.config import HeadConfig, HeadKind, HeadLayout, ascend
from draftwise.checkpoints.heads.weights import is_eagle3_tensor, normalised
from draftwise.checkpoints.rotary import depends_on_length
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
_LAYER = re.compile(r"layers\.(\d+)\.")
_EAGLE3_MARK = "eagle3"
# Both occur in the names of EAGLE heads, and not together in those of other models.
_EAGLE_MARKS = ("eagle", "forcausallm")
_DEFAULT_NUM_STATES = 3
_DEFAULT_EPSILON = 1e-6
_DEFAULT_THETA = 10_000.0
_DEFAULT_CONTEXT = 2048
_EAGLE3_LAYERS = ("llama", "qwen3")
# Families whose layers differ from Llama's in what the tensors show, or in nothing. The authors'
# heads have a Llama layer for targets of all of them.
_EAGLE_LAYERS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
_EAGLE_ARCHITECTURES = (
    "auto",
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
)


def is_head_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` says that it belongs to a drafting head."""
    return "speculators_model_type" in config or _is_eagle3(config) or _is_named_eagle(config)


def may_be_head_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is likely to belong to a head, which only the tensors show.

    The authors' heads of EAGLE-1 and EAGLE-2 have the configuration of a model of one layer, or
    that of the target.
    """
    return is_head_config(config) or config.get("num_hidden_layers") == 1


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    return "draft_vocab_size" in config or any(_EAGLE3_MARK in name for name in _names(config))


def _is_named_eagle(config: Mapping[str, Any]) -> bool:
    return any(all(mark in name for mark in _EAGLE_MARKS) for name in _names(config))


def _names(config: Mapping[str, Any]) -> list[str]:
    """The architectures, in lower case."""
    return [str(each).lower() for each in _list(config, "architectures")]


def parse_head_config(config: Mapping[str, Any], tensors: Collection[str] = ()) -> HeadConfig:
    """Read the configuration of a head.

    Args:
        config: the contents of the ``config.json`` of a head.
        tensors: names of its tensors, which decide how many layers it has and whether a head that
            the configuration does not name is one of EAGLE-3. Without them the configuration does.

    Raises:
        UnsupportedModelError: the head is of another kind, or a setting is missing or invalid.
    """
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind not in tuple(HeadKind):
            raise UnsupportedModelError(
                _ROLE,
                f"the head is of type {kind!r}; supported are heads of the types "
                + " and ".join(map(repr, map(str, HeadKind))),
            )
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise UnsupportedModelError(
                _ROLE, "config.json of the head has no transformer_layer_config"
            )
        if kind == HeadKind.EAGLE:
            return _parse_eagle(HeadLayout.SPECULATORS, config, layer, tensors)
        return _parse_eagle3(HeadLayout.SPECULATORS, config, layer, tensors)
    if _is_eagle3(config) or any(map(is_eagle3_tensor, tensors)):
        return _parse_eagle3(HeadLayout.SAFEAILAB, config, config, tensors)
    return _parse_eagle(HeadLayout.SAFEAILAB, config, config, tensors)


def _parse_eagle3(
    layout: HeadLayout,
    top: Mapping[str, Any],
    layer: Mapping[str, Any],
    tensors: Collection[str],
) -> HeadConfig:
    nested = _mapping(top, "eagle_config")
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            _ROLE, "the head reads the target's last hidden state only (use_aux_hidden_state)"
        )
    layers = _state_layers(top, nested)
    num_states = _size(top, "num_aux_hidden_states", len(layers or ()) or _DEFAULT_NUM_STATES)
    if layers is not None and len(layers) != num_states:
        raise UnsupportedModelError(
            _ROLE, f"num_aux_hidden_states is {num_states}, and {len(layers)} layer ids are given"
        )
    return HeadConfig(
        kind=HeadKind.EAGLE3,
        layout=layout,
        target_hidden_size=_size(top, "target_hidden_size", _size(layer, "hidden_size")),
        state_layers=layers,
        num_states=num_states,
        draft_vocab_size=_size(top, "draft_vocab_size", _size(layer, "vocab_size")),
        norm_before_residual=bool(top.get("norm_before_residual", False)),
        norm_before_fc=bool(nested.get("norm_before_fc", top.get("norm_before_fc", False))),
        fc_norm=bool(top.get("fc_norm", False)),
        norm_output=bool(top.get("norm_output", False)),
        logit_scale=_number(top, "logit_scale", 1.0),
        **_layer_settings(layer, _EAGLE3_LAYERS, HeadKind.EAGLE3, tensors),
    )


def _parse_eagle(
    layout: HeadLayout,
    top: Mapping[str, Any],
    layer: Mapping[str, Any],
    tensors: Collection[str],
) -> HeadConfig:
    architecture = top.get("transformer_layer_architecture", "auto")
    if architecture not in _EAGLE_ARCHITECTURES:
        raise UnsupportedModelError(
            _ROLE, f"transformer_layer_architecture of the head is {architecture!r}"
        )
    if layout is HeadLayout.SPECULATORS:
        # The configuration of its one layer may be that of the whole target.
        layer = {**layer, "num_hidden_layers": 1}
    bias = top.get("fusion_bias" if layout is HeadLayout.SPECULATORS else "bias")
    return HeadConfig(
        kind=HeadKind.EAGLE,
        layout=layout,
        target_hidden_size=_size(layer, "hidden_size"),
        state_layers=None,
        num_states=1,
        draft_vocab_size=_size(layer, "vocab_size"),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        logit_scale=_number(top, "logit_scale", 1.0),
        layernorms=layout is HeadLayout.SPECULATORS and bool(top.get("layernorms", False)),
        fc_bias=None if bias is None else bool(bias),
        **_layer_settings(layer, _EAGLE_LAYERS, HeadKind.EAGLE, tensors),
    )


def _layer_settings(
    layer: Mapping[str, Any], types: Sequence[str], kind: HeadKind, tensors: Collection[str]
) -> dict[str, Any]:
    """What heads of all kinds read from the configuration of their layers."""
    family = layer.get("model_type", "llama")
    if family not in types:
        raise UnsupportedModelError(
            _ROLE, f"the head's layer is of type {family!r}; supported are {', '.join(types)}"
        )
    num_layers, counted = _num_layers(layer, kind, tensors)
    hidden_size, num_heads = _size(layer, "hidden_size"), _size(layer, "num_attention_heads")
    num_kv_heads = _size(layer, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            _ROLE,
            f"num_attention_heads in config.json of the head, {num_heads}, must be a multiple of "
            f"num_key_value_heads, {num_kv_heads}",
        )
    return {
        "hidden_size": hidden_size,
        "target_vocab_size": _size(layer, "vocab_size"),
        "num_layers": num_layers,
        "counted_layers": counted,
        "intermediate_size": _size(layer, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": _size(layer, "head_dim", hidden_size // num_heads),
        "activation": str(layer.get("hidden_act", "silu")),
        "rms_norm_eps": _number(layer, "rms_norm_eps", _DEFAULT_EPSILON),
        "rope_parameters": _rope_parameters(layer),
        "max_position_embeddings": _size(layer, "max_position_embeddings", _DEFAULT_CONTEXT),
        "windows": _windows(layer, num_layers),
    }


def _num_layers(
    layer: Mapping[str, Any], kind: HeadKind, tensors: Collection[str]
) -> tuple[int, int | None]:
    """The number of layers, and what the configuration says of it.

    The configuration of published heads may be a copy of the target's, with all of its layers.

    Raises:
        UnsupportedModelError: the tensors are those of more layers than the configuration counts.
    """
    counted = _size(layer, "num_hidden_layers", 1)
    found = [_LAYER.match(normalised(name, kind)) for name in tensors]
    num_layers = max((int(each[1]) + 1 for each in found if each), default=counted)
    if num_layers > counted:
        raise UnsupportedModelError(
            _ROLE,
            f"num_hidden_layers in config.json of the head is {counted}, and its tensors are those "
            f"of {num_layers} layers; correct the number",
        )
    # Files with this name have no second layer.
    has_one = num_layers == 1 and any("midlayer." in name for name in tensors)
    return num_layers, None if has_one else counted


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object of a configuration; ``None`` in the file stands for an empty one."""
    value = config.get(name)
    if not isinstance(value, Mapping | None):
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be an object, got {value!r}"
        )
    return value or {}


def _list(config: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A list of a configuration; ``None`` in the file stands for an empty one."""
    value = config.get(name)
    if not isinstance(value, list | tuple | None):
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be a list, got {value!r}"
        )
    return value or ()


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
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


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A positive, finite number; ``None`` in the file stands for the default."""
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be a positive number, got {value!r}"
        )
    return float(value)


def _state_layers(top: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layer ids in the convention of :class:`HeadConfig`."""
    # (key, what is added): the input of a layer is the output of the one before.
    conventions = (
        ("eagle_aux_hidden_state_layer_ids", 0),
        ("aux_hidden_state_layer_ids", 0),
        ("target_layer_ids", 1),
    )
    for name, shift in conventions:
        ids = _list(top, name) or _list(nested, name)
        if not ids:
            continue
        if not all(isinstance(each, int) for each in ids) or not ascend(ids):
            raise UnsupportedModelError(
                _ROLE, f"{name} in config.json of the head must be ascending integers, got {ids!r}"
            )
        return tuple(each + shift for each in ids)
    return None


def _rope_parameters(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Type, base and parameters of the rotary embedding, from the older or the newer keys."""
    found = dict(_mapping(layer, "rope_parameters") or _mapping(layer, "rope_scaling"))
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", _number(layer, "rope_theta", _DEFAULT_THETA))
    if depends_on_length(found):
        raise UnsupportedModelError(
            _ROLE,
            f"the head's position scaling {found['rope_type']!r} depends on the length of the text",
        )
    return found


def _windows(layer: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer."""
    types = _list(layer, "layer_types") or ["full_attention"] * num_layers
    windows: list[int | None] = []
    for kind in types[:num_layers]:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(_ROLE, f"the head's attention is {kind!r}")
        windows.append(_size(layer, "sliding_window") if kind == "sliding_attention" else None)
    if len(windows) < num_layers:
        raise UnsupportedModelError(
            _ROLE, f"layer_types names {len(windows)} of the head's {num_layers} layers"
        )
    return tuple(windows)
