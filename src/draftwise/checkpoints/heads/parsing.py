"""Reading of the configuration of a drafting head, and recognition of one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftwise.checkpoints.heads.config import HeadConfig, HeadKind, HeadLayout, ascend
from draftwise.checkpoints.heads.settings import (
    attention_windows,
    layer_settings,
    list_of,
    number_of,
    object_of,
    size_of,
)
from draftwise.checkpoints.heads.weights import is_eagle3_tensor, normalised
from draftwise.checkpoints.other_drafts import MASK_TOKENS, other_kind
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
_LAYER = re.compile(r"layers\.(\d+)\.")
_EAGLE3_MARK = "eagle3"
# Both occur in the names of EAGLE heads, and not together in those of other models.
_EAGLE_MARKS = ("eagle", "forcausallm")
_DEFAULT_NUM_STATES = 3
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
    return [str(each).lower() for each in list_of(config, "architectures")]


def parse_head_config(config: Mapping[str, Any], tensors: Collection[str] = ()) -> HeadConfig:
    """Read the configuration of a head of EAGLE.

    Args:
        config: the contents of the ``config.json`` of a head.
        tensors: names of its tensors, which decide how many layers it has and whether a head that
            the configuration does not name is one of EAGLE-3. Without them the configuration does.

    Raises:
        UnsupportedModelError: the head is of another kind, or a setting is missing or invalid.
    """
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind not in (HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.PEAGLE):
            raise UnsupportedModelError(
                _ROLE,
                f"the head is of type {kind!r}; supported are heads of the types "
                + ", ".join(map(repr, map(str, HeadKind))),
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
    nested = object_of(top, "eagle_config")
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            _ROLE, "the head reads the target's last hidden state only (use_aux_hidden_state)"
        )
    layers = _state_layers(top, nested)
    is_parallel = other_kind(top) == "P-EAGLE"
    kind = HeadKind.PEAGLE if is_parallel else HeadKind.EAGLE3
    num_states = size_of(top, "num_aux_hidden_states", len(layers or ()) or _DEFAULT_NUM_STATES)
    if layers is not None and len(layers) != num_states:
        raise UnsupportedModelError(
            _ROLE, f"num_aux_hidden_states is {num_states}, and {len(layers)} layer ids are given"
        )
    return HeadConfig(
        kind=kind,
        layout=layout,
        target_hidden_size=size_of(top, "target_hidden_size", size_of(layer, "hidden_size")),
        state_layers=layers,
        num_states=num_states,
        draft_vocab_size=size_of(top, "draft_vocab_size", size_of(layer, "vocab_size")),
        norm_before_residual=bool(top.get("norm_before_residual", False)),
        norm_before_fc=bool(nested.get("norm_before_fc", top.get("norm_before_fc", False))),
        fc_norm=bool(top.get("fc_norm", False)),
        norm_output=bool(top.get("norm_output", False)),
        logit_scale=number_of(top, "logit_scale", 1.0),
        mask_token_id=_mask_token(top, size_of(layer, "vocab_size")) if is_parallel else None,
        **_layer_settings(layer, _EAGLE3_LAYERS, kind, tensors),
    )


def _mask_token(top: Mapping[str, Any], vocab_size: int) -> int:
    """The token that stands for those to be predicted."""
    for name in MASK_TOKENS:
        value = top.get(name)
        if value is not None:
            if type(value) is int and 0 <= value < vocab_size:
                return value
            raise UnsupportedModelError(
                _ROLE,
                f"{name} in config.json of the head must be one of {vocab_size} tokens, got "
                f"{value!r}",
            )
    raise UnsupportedModelError(_ROLE, f"config.json of the head has no {MASK_TOKENS[0]}")


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
        target_hidden_size=size_of(layer, "hidden_size"),
        state_layers=None,
        num_states=1,
        draft_vocab_size=size_of(layer, "vocab_size"),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        logit_scale=number_of(top, "logit_scale", 1.0),
        layernorms=layout is HeadLayout.SPECULATORS and bool(top.get("layernorms", False)),
        fc_bias=None if bias is None else bool(bias),
        **_layer_settings(layer, _EAGLE_LAYERS, HeadKind.EAGLE, tensors),
    )


def _layer_settings(
    layer: Mapping[str, Any], types: Sequence[str], kind: HeadKind, tensors: Collection[str]
) -> dict[str, Any]:
    """What heads of all kinds read from the configuration of their layers."""
    settings = layer_settings(layer, types)
    num_layers, counted = _num_layers(layer, kind, tensors)
    return settings | {
        "num_layers": num_layers,
        "counted_layers": counted,
        "windows": attention_windows(layer, num_layers),
    }


def _num_layers(
    layer: Mapping[str, Any], kind: HeadKind, tensors: Collection[str]
) -> tuple[int, int | None]:
    """The number of layers, and what the configuration says of it.

    The configuration of published heads may be a copy of the target's, with all of its layers.

    Raises:
        UnsupportedModelError: the tensors are those of more layers than the configuration counts.
    """
    counted = size_of(layer, "num_hidden_layers", 1)
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


def _state_layers(top: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layer ids in the convention of :class:`HeadConfig`."""
    # (key, what is added): the input of a layer is the output of the one before.
    conventions = (
        ("eagle_aux_hidden_state_layer_ids", 0),
        ("aux_hidden_state_layer_ids", 0),
        ("target_layer_ids", 1),
    )
    for name, shift in conventions:
        ids = list_of(top, name) or list_of(nested, name)
        if not ids:
            continue
        if not all(isinstance(each, int) for each in ids) or not ascend(ids):
            raise UnsupportedModelError(
                _ROLE, f"{name} in config.json of the head must be ascending integers, got {ids!r}"
            )
        return tuple(each + shift for each in ids)
    return None
