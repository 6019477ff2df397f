"""The text part of checkpoints that read images or sound as well.

Such a model is loaded without the parts that encode images and sound, which then take no memory.
Its own modules compute the text, or what computes ordinary models of its text part's architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    TimmWrapperModel,
)

from draftwise.errors import UnsupportedModelError

try:
    from transformers import AutoModelForMultimodalLM
except ImportError:  # added to transformers in 5.1
    AutoModelForMultimodalLM = AutoModelForImageTextToText

_COMPOSITES = (AutoModelForImageTextToText, AutoModelForMultimodalLM)


class AbsentEncoder(nn.Module):
    """Stands where a model has an encoder of images or sound that was not loaded."""

    def __init__(self, config: Any, role: str) -> None:
        super().__init__()
        self.config = config
        self._role = role

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to encode.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            self._role, "only the text part of this model is loaded; it reads no images or sound"
        )


def is_composite(config: Any) -> bool:
    """Whether a configuration describes a model with other parts beside a text model."""
    return config.get_text_config() is not config


def text_model_class(config: Any, role: str) -> Any | None:
    """The class that loads the text part of a composite model.

    Args:
        config: the configuration of a checkpoint.
        role: the model's role; named in errors.

    Returns:
        A class with ``from_pretrained``; ``None`` where ``AutoModelForCausalLM`` is to load the
        model.
    """
    if not is_composite(config) and type(config) in AutoModelForCausalLM._model_mapping:
        return None
    for auto in _COMPOSITES:
        found = auto._model_mapping.get(type(config), None)
        if found is not None:
            model_class = found[0] if isinstance(found, list | tuple) else found
            return _without_encoders(model_class, role)
    return None


def absent_encoders(model: nn.Module) -> list[str]:
    """Names of the modules of a model that were not loaded."""
    return [name for name, each in model.named_modules() if isinstance(each, AbsentEncoder)]


def _without_encoders(model_class: Any, role: str) -> Any:
    class TextPart(model_class):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            with _without_timm(role):
                super().__init__(config, *args, **kwargs)
            text = config.get_text_config()
            for parent in list(self.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, PreTrainedModel) and not _computes(child, text):
                        setattr(parent, name, AbsentEncoder(child.config, role))

    # transformers finds the conversions of a checkpoint by these names.
    TextPart.__name__ = model_class.__name__
    TextPart.__qualname__ = model_class.__qualname__
    TextPart.__module__ = model_class.__module__
    return TextPart


@contextmanager
def _without_timm(role: str) -> Iterator[None]:
    """Within the context, encoders that need the package timm are not built."""
    build = AutoModel.from_config

    def from_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        if AutoModel._model_mapping.get(type(config), None) is TimmWrapperModel:
            return AbsentEncoder(config, role)
        return build(config, *args, **kwargs)

    AutoModel.from_config = from_config
    try:
        yield
    finally:
        AutoModel.from_config = build


def _computes(module: PreTrainedModel, text: Any) -> bool:
    """Whether a module contains the text model."""
    return any(
        isinstance(each, PreTrainedModel) and each.config is text for each in module.modules()
    )
