"""Checks of the models of a run before a prompt is answered, from their configurations alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import AutoConfig

from draftwise.checkpoints.gguf import is_gguf
from draftwise.checkpoints.source import locate_files, split_name
from draftwise.checkpoints.support import context_length
from draftwise.errors import InvalidParameterError, UnsupportedModelError

_ROLE = "target"


def check_target(
    name: str,
    layers: Callable[[int], Sequence[int]],
    length: int,
    trust_remote_code: bool = False,
) -> Any:
    """Refuse targets and settings with which no draft can be trained.

    Args:
        name: a folder, a hub id or a zoo name.
        layers: returns the states to read for a number of layers.
        length: tokens per training row.
        trust_remote_code: whether to run code that comes with the model.

    Returns:
        The configuration of the target, or of its text part.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: it is quantised, its configuration cannot be read, or its context is
            shorter than ``length``.
        InvalidParameterError: it has no layers of the given numbers.
    """
    config = read_config(name, _ROLE, trust_remote_code)
    try:
        context_length(config, _ROLE, length)
    except UnsupportedModelError as error:
        raise UnsupportedModelError("length", error.message) from error
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(num_layers, int):
        check_layers(layers(num_layers), num_layers)
    return config


def read_config(name: str, role: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a model, or of its text part.

    Args:
        name: a folder, a hub id or a zoo name.
        role: ``"target"`` or ``"draft"``; named in errors.
        trust_remote_code: whether to run code that comes with the model.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: it is quantised, or its configuration cannot be read.
    """
    check_precision(name, role)
    location = locate_files(name, role)
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken file can make the library raise anything
        if "trust_remote_code" in str(error):
            reason = "it contains custom code; if you trust it, set trust_remote_code"
        else:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedModelError(role, f"cannot read {name!r}: {reason}") from error
    return getattr(config, "text_config", None) or config


def check_precision(name: str, role: str) -> None:
    """Refuse a name of quantised weights.

    Args:
        name: name of a model, with or without a quantisation.
        role: ``"target"`` or ``"draft"``; named in errors.

    Raises:
        UnsupportedModelError: the weights are quantised.
    """
    quantization = "GGUF" if is_gguf(name) else split_name(name)[1]
    if quantization is not None:
        raise UnsupportedModelError(
            role,
            f"{name!r} is quantised ({quantization}), and its hidden states cannot be read for "
            "training; name the model with safetensors weights",
        )


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Refuse numbers of hidden states that a target does not have.

    Raises:
        InvalidParameterError: they do not ascend, or one is not in 0 … ``num_layers``.
    """
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong or list(layers) != sorted(set(layers)):
        raise InvalidParameterError(
            "layers",
            f"must be ascending numbers between 0 and {num_layers}, the number of the target's "
            f"layers; got {', '.join(map(str, layers))}",
        )


def rope_theta(config: Any) -> float:
    """Base of the target's rotary embedding; of its full attention where it has two."""
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention", found)
    return float(found.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0)
