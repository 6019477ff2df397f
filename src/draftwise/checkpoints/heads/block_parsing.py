"""Reading of the configuration of a head that drafts blocks, in the three layouts of its folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from draftwise.checkpoints.heads.block_config import (
    MAX_BLOCK_SIZE,
    BlockHeadConfig,
    ConvolutionConfig,
    MarkovConfig,
    MarkovKind,
    SelectorConfig,
)
from draftwise.checkpoints.heads.block_keys import (
    DFLASH_KEYS,
    IN_SPECULATORS,
    OF_DFLASH_2,
    OF_VARIANTS,
    SPECULATORS_KEYS,
)
from draftwise.checkpoints.heads.config import HeadKind, HeadLayout, ascend
from draftwise.checkpoints.heads.settings import (
    attention_windows,
    layer_settings,
    list_of,
    number_of,
    object_of,
    size_of,
)
from draftwise.checkpoints.other_drafts import BLOCK_HEADS, other_kind
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
_LAYERS = ("llama", "qwen3")
_IN_BLOCKS = (HeadKind.DFLASH, HeadKind.DFLASH2, HeadKind.DSPARK)


def is_block_head_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` says that it belongs to a head that drafts blocks."""
    if IN_SPECULATORS in config:
        return config[IN_SPECULATORS] in _IN_BLOCKS
    return other_kind(config) in BLOCK_HEADS


def parse_block_head_config(config: Mapping[str, Any]) -> BlockHeadConfig:
    """Read the configuration of a head for which :func:`is_block_head_config` holds.

    Raises:
        UnsupportedModelError: a setting is missing or invalid, or not supported. The error names
            its key.
    """
    for name, only in OF_VARIANTS.items():
        value = config.get(name)
        if value is not None and value != only:
            raise UnsupportedModelError(
                _ROLE, f"{name} in config.json of the head is {value!r}, which is not supported"
            )
    parse = _parse_zlab if "dflash_config" in config else _parse_deepspec
    parsed = (_parse_speculators if IN_SPECULATORS in config else parse)(config)
    _check(parsed)
    return parsed


def _check(parsed: BlockHeadConfig) -> None:
    """Refuse sizes that do not fit each other."""
    if parsed.mask_token_id >= parsed.target_vocab_size:
        raise UnsupportedModelError(
            _ROLE,
            f"mask_token_id in config.json of the head is {parsed.mask_token_id}, and the target "
            f"has {parsed.target_vocab_size} tokens",
        )
    convolution, selector = parsed.convolution, parsed.selector
    if convolution is not None and parsed.hidden_size % convolution.group_size:
        raise UnsupportedModelError(
            _ROLE,
            f"conv_group_size in config.json of the head, {convolution.group_size}, must divide "
            f"hidden_size, {parsed.hidden_size}",
        )
    if convolution is not None and convolution.taps > parsed.block_size:
        raise UnsupportedModelError(
            _ROLE,
            f"conv_kernel_size in config.json of the head, {convolution.taps}, must be at most "
            f"block_size, {parsed.block_size}",
        )
    temperatures = parsed.confidence_temperatures
    if temperatures and len(temperatures) != parsed.num_drafted:
        raise UnsupportedModelError(
            _ROLE,
            f"confidence_temperatures in config.json of the head has {len(temperatures)} numbers, "
            f"and a block predicts {parsed.num_drafted} tokens",
        )
    own = parsed.draft_vocab_size
    if selector is not None and (own != parsed.target_vocab_size or selector.num_candidates > own):
        raise UnsupportedModelError(
            _ROLE,
            f"selector_top_k in config.json of the head is {selector.num_candidates}, of {own} "
            f"tokens of {parsed.target_vocab_size}; a selector needs all tokens of the target",
        )


def _parse_zlab(config: Mapping[str, Any]) -> BlockHeadConfig:
    nested = object_of(config, "dflash_config")
    _refuse_unknown(nested, DFLASH_KEYS, "dflash_config.")
    # A setting in the object has precedence.
    settings = {**config, **{key: each for key, each in nested.items() if each is not None}}
    layer = layer_settings(config, _LAYERS)
    num_layers = size_of(config, "num_hidden_layers")
    windows = attention_windows(config, num_layers)
    causal = config.get("is_causal", nested.get("causal"))
    softcap = number_of(settings, "final_logit_softcapping", 0.0)
    return BlockHeadConfig(
        layout=HeadLayout.ZLAB,
        target_hidden_size=layer["hidden_size"],
        draft_vocab_size=layer["target_vocab_size"],
        num_layers=num_layers,
        windows=windows,
        logit_scale=number_of(settings, "output_multiplier", 1.0),
        discards_anchor=True,
        is_causal=tuple(
            window is not None if causal is None else bool(causal) for window in windows
        ),
        windows_from_anchor=False,
        embedding_scale=number_of(settings, "input_embedding_scale", 1.0),
        logit_softcap=softcap or None,
        **layer,
        **_block_settings(settings, "target_layer_ids", 1),
        **_dependences(settings),
    )


def _parse_deepspec(config: Mapping[str, Any]) -> BlockHeadConfig:
    layer = layer_settings(config, _LAYERS)
    num_layers = size_of(config, "num_hidden_layers")
    windows = attention_windows(config, num_layers)
    if any(window is not None for window in windows):
        raise UnsupportedModelError(
            _ROLE,
            "layer_types in config.json of the head has sliding_attention, which heads of this "
            "layout are not trained with",
        )
    return BlockHeadConfig(
        layout=HeadLayout.DEEPSPEC,
        target_hidden_size=layer["hidden_size"],
        draft_vocab_size=layer["target_vocab_size"],
        num_layers=num_layers,
        windows=windows,
        logit_scale=1.0,
        discards_anchor=False,
        is_causal=(False,) * num_layers,
        windows_from_anchor=False,
        **layer,
        **_block_settings(config, "target_layer_ids", 1),
        **_dependences(config),
    )


def _parse_speculators(config: Mapping[str, Any]) -> BlockHeadConfig:
    _refuse_unknown(config, SPECULATORS_KEYS)
    nested = object_of(config, "transformer_layer_config")
    if not nested:
        raise UnsupportedModelError(
            _ROLE, "config.json of the head has no transformer_layer_config"
        )
    layer = layer_settings(nested, _LAYERS)
    num_layers = size_of(nested, "num_hidden_layers")
    windows = attention_windows(nested, num_layers)
    by_default = config[IN_SPECULATORS] == HeadKind.DFLASH2
    causal = not _flag(config, "sliding_window_non_causal", by_default)
    return BlockHeadConfig(
        layout=HeadLayout.SPECULATORS,
        target_hidden_size=size_of(config, "target_hidden_size", layer["hidden_size"]),
        draft_vocab_size=size_of(config, "draft_vocab_size", layer["target_vocab_size"]),
        num_layers=num_layers,
        windows=windows,
        logit_scale=1.0,
        discards_anchor=not _flag(config, "sample_from_anchor"),
        is_causal=tuple(causal and window is not None for window in windows),
        windows_from_anchor=True,
        **layer,
        **_block_settings(config, "aux_hidden_state_layer_ids", 0),
        **_dependences(config),
    )


def _block_settings(settings: Mapping[str, Any], ids_key: str, shift: int) -> dict[str, Any]:
    """What the block consists of, and what the head reads of the target.

    Args:
        settings: has the settings.
        ids_key: key of the layer ids.
        shift: added to an id to get the number of a state.
    """
    ids = list_of(settings, ids_key)
    if not ids:
        raise UnsupportedModelError(
            _ROLE,
            f"config.json of the head has no {ids_key}, and with other layers than those of its "
            "training it drafts nothing that is accepted",
        )
    is_valid = all(type(each) is int and each + shift >= 0 for each in ids) and ascend(ids)
    if not is_valid:
        raise UnsupportedModelError(
            _ROLE, f"{ids_key} in config.json of the head must be ascending layers, got {ids!r}"
        )
    block_size = size_of(settings, "block_size")
    if not 2 <= block_size <= MAX_BLOCK_SIZE:
        raise UnsupportedModelError(
            _ROLE,
            f"block_size in config.json of the head must be 2 to {MAX_BLOCK_SIZE}, got "
            f"{block_size}",
        )
    mask = settings.get("mask_token_id")
    if type(mask) is not int or mask < 0:
        raise UnsupportedModelError(
            _ROLE, f"mask_token_id in config.json of the head must be a token id, got {mask!r}"
        )
    return {
        "state_layers": tuple(each + shift for each in ids),
        "ids_key": ids_key,
        "block_size": block_size,
        "mask_token_id": mask,
    }


def _dependences(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The parts by which tokens of a block depend on each other, and the confidence head."""
    rank = settings.get("markov_rank") or 0
    has_confidence = _flag(settings, "enable_confidence_head")
    reads_markov = has_confidence and _flag(settings, "confidence_head_with_markov")
    markov = None
    if rank:
        kind = str(settings.get("markov_head_type", MarkovKind.VANILLA)).lower()
        if kind not in tuple(MarkovKind):
            raise UnsupportedModelError(
                _ROLE,
                f"markov_head_type in config.json of the head is {kind!r}; supported are "
                + ", ".join(map(repr, map(str, MarkovKind))),
            )
        markov = MarkovConfig(MarkovKind(kind), size_of(settings, "markov_rank"))
    elif reads_markov:
        raise UnsupportedModelError(
            _ROLE, "confidence_head_with_markov in config.json of the head needs a markov_rank"
        )
    convolution = selector = None
    if any(settings.get(name) is not None for name in OF_DFLASH_2):
        taps, group_size, selector_rank, top_k = (size_of(settings, each) for each in OF_DFLASH_2)
        convolution = ConvolutionConfig(taps, group_size)
        selector = SelectorConfig(selector_rank, top_k)
    if selector is not None and markov is not None:
        raise UnsupportedModelError(
            _ROLE, "config.json of the head has a markov_rank and a selector_rank; one is supported"
        )
    kind = HeadKind.DFLASH2 if selector else HeadKind.DSPARK if markov else HeadKind.DFLASH
    return {
        "kind": kind,
        "convolution": convolution,
        "selector": selector,
        "markov": markov,
        "has_confidence": has_confidence,
        "confidence_reads_markov": reads_markov,
        "confidence_temperatures": _temperatures(settings) if has_confidence else (),
    }


def _temperatures(settings: Mapping[str, Any]) -> tuple[float, ...]:
    """The temperatures of the confidence in each token, which Draftwise writes."""
    found = list_of(settings, "confidence_temperatures")
    if not all(type(each) in (int, float) and 0 < each < math.inf for each in found):
        raise UnsupportedModelError(
            _ROLE,
            "confidence_temperatures in config.json of the head must be positive numbers, got "
            f"{found!r}",
        )
    return tuple(map(float, found))


def _flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A setting that is true or false; ``None`` in the file stands for the default."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise UnsupportedModelError(
            _ROLE, f"{name} in config.json of the head must be true or false, got {value!r}"
        )
    return value


def _refuse_unknown(config: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> None:
    """Refuse settings that may change what is computed, unless they are off."""
    unknown = sorted(key for key in config.keys() - set(known) if config[key] not in (None, False))
    if unknown:
        raise UnsupportedModelError(
            _ROLE,
            f"{prefix}{unknown[0]} in config.json of the head is unknown, and may change what the "
            "head computes",
        )
