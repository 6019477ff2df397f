"""Checks of a model's configuration. Models that the engine cannot serve are refused at load."""

from __future__ import annotations

from typing import Any

from draftwise.checkpoints.rotary import depends_on_length, rotary_settings
from draftwise.errors import UnsupportedModelError

# The name of Draftwise's attention in transformers.
ATTENTION_NAME = "draftwise_packed"

_SHOWN_CHARACTERS = 120
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Types of layers with a recurrence, and beside it other layers or none.
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_LAYER_TYPES = _ATTENTION | RECURRENT_TYPES | {"moe", "mlp", "dense", "sparse"}


def context_length(
    config: Any, role: str, requested: int | None, may_be_shorter: bool = False
) -> int:
    """Resolve ``max_model_len`` against the model's own context length.

    Args:
        config: a Hugging Face configuration.
        role: ``"target"`` or ``"draft"``, named in the error.
        requested: longest context to serve; ``None`` for the model's own.
        may_be_shorter: whether to use the model's own if it is shorter, as for drafts.

    Raises:
        UnsupportedModelError: the requested context is longer than the model's, or none is
            requested and the configuration has none.
    """
    text = config.get_text_config()
    known = next(
        (
            value
            for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
            # XLNet has -1 for no limit.
            if isinstance(value := getattr(text, name, None), int) and value > 0
        ),
        None,
    )
    if known is None and requested is None:
        raise UnsupportedModelError(
            "max_model_len", f"the {role}'s configuration has no context length; set one"
        )
    if requested is None:
        return int(known)  # type: ignore[arg-type]
    if known is not None and requested > known:
        if may_be_shorter:
            return int(known)
        raise UnsupportedModelError(
            "max_model_len", f"{requested} exceeds the {role}'s context of {known} tokens"
        )
    return requested


def check_config(config: Any, role: str, max_model_len: int) -> None:
    """Refuse configurations whose attention is not supported.

    Args:
        config: a Hugging Face configuration.
        role: ``"target"`` or ``"draft"``, named in the error.
        max_model_len: longest context that will be served.

    Raises:
        UnsupportedModelError: names what is not supported, and the remedy if there is one.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(role, f"{kind} has an encoder; only decoder models are served")
    text = config.get_text_config()
    if getattr(text, "is_causal", True) is False:
        raise UnsupportedModelError(role, f"{kind} is not causal")
    _check_layer_types(text, role, kind)
    _check_rope(text, role, kind, max_model_len)


def check_attention(model: Any, role: str) -> None:
    """Refuse a model whose attention cannot be replaced.

    Args:
        model: a Hugging Face model.
        role: ``"target"`` or ``"draft"``, named in the error.

    Raises:
        UnsupportedModelError: its attention is code of its own.
    """
    # Without this, such a model is found by what its code raises when it gets packed tokens.
    can_replace = getattr(type(model), "_can_set_attn_implementation", None)
    if can_replace is not None and not can_replace():
        raise own_attention(role, model.config.model_type)


def own_attention(role: str, family: str) -> UnsupportedModelError:
    """The error for a model whose attention is code of its own."""
    return UnsupportedModelError(role, f"{family} does not support custom attention functions")


def own_failure(error: Exception) -> str:
    """A clause for an exception of a model's own code, which says what it is in one line."""
    text = str(error).strip().splitlines()
    detail = f" ({text[0][:_SHOWN_CHARACTERS]})" if text else ""
    return f"the model's own code raises {type(error).__name__}{detail}"


def _check_layer_types(config: Any, role: str, kind: str) -> None:
    for index, layer in enumerate(getattr(config, "layer_types", None) or []):
        if layer not in _LAYER_TYPES:
            raise UnsupportedModelError(
                role, f"layer {index} of this {kind} model is {layer!r}, which is not supported"
            )


def _check_rope(config: Any, role: str, kind: str, max_model_len: int) -> None:
    for settings in rotary_settings(getattr(config, "rope_parameters", None)):
        if not depends_on_length(settings):
            continue
        # These scalings depend on the longest sequence of the batch, so that one request would
        # change another's text. Up to the original context they are constant.
        original: int = (
            settings.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or getattr(config, "max_position_embeddings", None)
            or 0
        )
        if max_model_len > original:
            raise UnsupportedModelError(
                role,
                f"this {kind} model's {settings['rope_type']!r} position scaling changes beyond "
                f"{original} tokens; set max_model_len to {original} or less",
            )
