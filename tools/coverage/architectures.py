"""The architectures of the installed ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Architecture:
    """An architecture with a causal language model.

    Attributes:
        kind: ``"causal"``, or ``"image-text"`` for those that also read images or sounds.
        name: its model type.
        class_name: the class of its models.
    """

    kind: str
    name: str
    class_name: str

    @property
    def config_class(self) -> type[PreTrainedConfig]:
        """The class of its configurations."""
        kind: type[PreTrainedConfig] = CONFIG_MAPPING[self.name]
        return kind

    @property
    def auto_class(self) -> Any:
        """The class of ``transformers`` that builds and loads its models."""
        if self.kind == "causal":
            return AutoModelForCausalLM
        known = self.name in _names("IMAGE_TEXT_TO_TEXT")
        return AutoModelForImageTextToText if known else AutoModelForMultimodalLM


def causal() -> list[Architecture]:
    """All architectures that ``AutoModelForCausalLM`` knows."""
    return [Architecture("causal", *each) for each in _names("CAUSAL_LM").items()]


def image_text() -> list[Architecture]:
    """All others that read images or sounds beside text, and write text.

    Some of them are also causal architectures, with a class for their text alone.
    """
    known = _names("CAUSAL_LM")
    others = _names("IMAGE_TEXT_TO_TEXT") | _names("MULTIMODAL_LM")
    return [
        Architecture("image-text", name, class_name)
        for name, class_name in others.items()
        if known.get(name) != class_name
    ]


def _names(mapping: str) -> dict[str, str]:
    return dict(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"))
