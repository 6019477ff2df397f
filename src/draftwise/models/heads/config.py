"""The configuration of a drafting head, whichever layout its folder has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
_ARCHITECTURE_MARK = "eagle3"
_DEFAULT_NUM_STATES = 3
_DEFAULT_EPSILON = 1e-6
_DEFAULT_THETA = 10_000.0
_DEFAULT_CONTEXT = 2048
_LAYER_TYPES = ("llama", "qwen3")
# Scalings of the rotary embedding that depend on the length of the text.
_LENGTH_DEPENDENT_ROTARY = frozenset({"dynamic", "longrope"})


class HeadLayout(StrEnum):
    """Who defined the layout of a head's folder.

    Attributes:
        SAFEAILAB: the authors of EAGLE. The configuration is flat.
        SPECULATORS: the library ``speculators``. The decoder layer has a configuration of its own.
    """

    SAFEAILAB = "safeailab"
    SPECULATORS = "speculators"


@dataclass(frozen=True)
class HeadConfig:
    """An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), in terms that both layouts share.

    Hidden states of the target are numbered as in ``transformers``: state *a* is the input of layer
    *a*, ``hidden_states[a]``, and the number of layers stands for the output of the last layer,
    before the final norm. Ids of the other convention, in which *k* is the output of layer *k*, are
    converted to *k* + 1.

    Attributes:
        layout: the layout that it was written in.
        hidden_size: size of the head's residual stream and of the embedding.
        target_hidden_size: size of the target's residual stream.
        state_layers: the states of the target that the head reads, ascending; ``None`` for the
            default of EAGLE-3, see :meth:`states_of`.
        num_states: how many states it reads.
        draft_vocab_size: number of tokens that it can propose.
        target_vocab_size: number of tokens that it reads, which is the target's vocabulary.
        norm_before_residual: whether the residual stream begins with the normalised state.
        norm_before_fc: whether the states are normalised together before they are projected.
        fc_norm: whether each state is normalised before they are projected.
        norm_output: whether the next token of a draft reads the head's output after the final norm.
        num_layers: decoder layers. Only the first one reads the embedding and the state.
        intermediate_size: size of the gate of the feed-forward block.
        num_heads, num_kv_heads, head_size: sizes of the attention.
        activation: activation of the gate, as named in the configuration.
        rms_norm_eps: added to the mean square in all norms.
        rope_parameters: ``rope_type``, ``rope_theta`` and parameters of the type.
        max_position_embeddings: context with which the rotary embedding was defined.
        windows: ``[num_layers]`` number of newest tokens that a layer attends to; ``None`` for all.
        logit_scale: factor of the logits.
    """

    layout: HeadLayout
    hidden_size: int
    target_hidden_size: int
    state_layers: tuple[int, ...] | None
    num_states: int
    draft_vocab_size: int
    target_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    activation: str
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    logit_scale: float

    def states_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The states that it reads of a target, by default (2, L // 2, L - 3).

        Args:
            num_target_layers: the target's number of layers L.

        Raises:
            UnsupportedModelError: the target has no such layers.
        """
        layers = self.state_layers
        if layers is None:
            layers = (2, num_target_layers // 2, num_target_layers - 3)
        if not all(0 <= layer <= num_target_layers for layer in layers) or not _ascend(layers):
            raise UnsupportedModelError(
                _ROLE,
                f"the head reads the hidden states {list(layers)}, and the target has "
                f"{num_target_layers} layers; set eagle_aux_hidden_state_layer_ids in config.json",
            )
        return layers

    def check_target(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Refuse a target that the head was not made for.

        Args:
            hidden_size: size of the target's residual stream.
            vocab_size: the target's number of tokens.
            num_layers: its number of layers.

        Raises:
            UnsupportedModelError: names the size that differs.
        """
        for what, own, targets in (
            ("a hidden size", self.target_hidden_size, hidden_size),
            ("a vocabulary", self.target_vocab_size, vocab_size),
        ):
            if own != targets:
                raise UnsupportedModelError(
                    _ROLE,
                    f"the head was made for a target with {what} of {own}, and the target has "
                    f"{targets}; choose a head of this target",
                )
        self.states_of(num_layers)


def is_head_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a drafting head."""
    architectures = config.get("architectures") or ()
    return (
        "speculators_model_type" in config
        or "draft_vocab_size" in config
        or any(_ARCHITECTURE_MARK in str(each).lower() for each in architectures)
    )


def parse_head_config(config: Mapping[str, Any]) -> HeadConfig:
    """Read the configuration of a head.

    Args:
        config: the contents of a ``config.json`` for which :func:`is_head_config` is true.

    Raises:
        UnsupportedModelError: the head is of another kind, or a setting is missing or invalid.
    """
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind != "eagle3":
            raise UnsupportedModelError(
                _ROLE, f"the head is of type {kind!r}; supported are heads of type 'eagle3'"
            )
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise UnsupportedModelError(
                _ROLE, "config.json of the head has no transformer_layer_config"
            )
        return _parse(HeadLayout.SPECULATORS, config, layer)
    return _parse(HeadLayout.SAFEAILAB, config, config)


def _parse(layout: HeadLayout, top: Mapping[str, Any], layer: Mapping[str, Any]) -> HeadConfig:
    nested = top.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            _ROLE, "the head reads the target's last hidden state only (use_aux_hidden_state)"
        )
    kind = layer.get("model_type", "llama")
    if kind not in _LAYER_TYPES:
        raise UnsupportedModelError(
            _ROLE, f"the head's layer is of type {kind!r}; supported are {', '.join(_LAYER_TYPES)}"
        )
    hidden_size, vocab_size = _size(layer, "hidden_size"), _size(layer, "vocab_size")
    num_heads = _size(layer, "num_attention_heads")
    num_layers = _size(layer, "num_hidden_layers", 1)
    layers = _state_layers(top, nested)
    num_states = _size(top, "num_aux_hidden_states", len(layers or ()) or _DEFAULT_NUM_STATES)
    if layers is not None and len(layers) != num_states:
        raise UnsupportedModelError(
            _ROLE, f"num_aux_hidden_states is {num_states}, and {len(layers)} layer ids are given"
        )
    return HeadConfig(
        layout,
        hidden_size,
        _size(top, "target_hidden_size", hidden_size),
        layers,
        num_states,
        _size(top, "draft_vocab_size", vocab_size),
        vocab_size,
        bool(top.get("norm_before_residual", False)),
        bool(nested.get("norm_before_fc", top.get("norm_before_fc", False))),
        bool(top.get("fc_norm", False)),
        bool(top.get("norm_output", False)),
        num_layers,
        _size(layer, "intermediate_size"),
        num_heads,
        _size(layer, "num_key_value_heads", num_heads),
        _size(layer, "head_dim", hidden_size // num_heads),
        str(layer.get("hidden_act", "silu")),
        float(layer.get("rms_norm_eps", _DEFAULT_EPSILON)),
        _rope_parameters(layer),
        _size(layer, "max_position_embeddings", _DEFAULT_CONTEXT),
        _windows(layer, num_layers),
        float(top.get("logit_scale", 1.0)),
    )


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


def _ascend(layers: Sequence[int]) -> bool:
    return all(first < second for first, second in pairwise(layers))


def _state_layers(top: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Layer ids in the convention of :class:`HeadConfig`."""
    # (key, what is added): the input of a layer is the output of the one before.
    conventions = (
        ("eagle_aux_hidden_state_layer_ids", 0),
        ("aux_hidden_state_layer_ids", 0),
        ("target_layer_ids", 1),
    )
    for name, shift in conventions:
        ids = top.get(name) or nested.get(name)
        if not ids:
            continue
        if not all(isinstance(each, int) for each in ids) or not _ascend(ids):
            raise UnsupportedModelError(
                _ROLE, f"{name} in config.json of the head must be ascending integers, got {ids!r}"
            )
        return tuple(each + shift for each in ids)
    return None


def _rope_parameters(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Type, base and parameters of the rotary embedding, from the older or the newer keys."""
    found = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", layer.get("rope_theta", _DEFAULT_THETA))
    if found["rope_type"] in _LENGTH_DEPENDENT_ROTARY:
        raise UnsupportedModelError(
            _ROLE,
            f"the head's position scaling {found['rope_type']!r} depends on the length of the text",
        )
    return found


def _windows(layer: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer."""
    types = layer.get("layer_types") or ["full_attention"] * num_layers
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
