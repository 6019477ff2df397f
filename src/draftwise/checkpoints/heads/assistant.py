"""The files of an assistant of Gemma 4, which reads the keys and values of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from draftwise.checkpoints.heads.files import read_json, read_tensors
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
_EMBEDDING = "model.embed_tokens.weight"
# Layers of these kinds read the keys and values of the target's last layer of the same kind.
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Settings of Gemma 4 that no assistant has.
_ABSENT = (
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "enable_moe_block",
    "use_double_wide_mlp",
)


class _QueriesOnly:
    """Says that no layer of a text model computes keys and values.

    The property of ``transformers`` expects layers that do, and raises for an assistant.
    """

    num_hidden_layers: int

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """How each layer gets its keys and values: from outside."""
        return ["reuse"] * self.num_hidden_layers


class _TextConfig(_QueriesOnly, Gemma4TextConfig):  # type: ignore[misc]
    """A text model of Gemma 4 without keys and values of its own."""


class _UnifiedTextConfig(_QueriesOnly, Gemma4UnifiedTextConfig):  # type: ignore[misc]
    """A text model of Gemma 4 Unified without keys and values of its own."""


_TEXT_CONFIGS: dict[str, Any] = {
    "gemma4_text": _TextConfig,
    "gemma4_unified_text": _UnifiedTextConfig,
}


@dataclass(frozen=True)
class AssistantConfig:
    """An assistant of Gemma 4.

    Attributes:
        text: configuration of its layers, as ``transformers`` builds them.
        target_hidden_size: size of the target's residual stream.
        num_centroids: number of groups of tokens that it chooses from; ``None`` if it computes the
            logits of all tokens.
        num_chosen: number of groups whose logits it computes.
    """

    text: Any
    target_hidden_size: int
    num_centroids: int | None
    num_chosen: int


@dataclass(frozen=True)
class AssistantWeights:
    """The weights of an assistant.

    Attributes:
        text: of its layers, final norm and embedding, by the names of ``transformers``.
        entering: ``[hidden, 2 * target_hidden]`` projection of the target's embedding and state.
        leaving: ``[target_hidden, hidden]`` projection to what stands for the target's state.
        head: ``[tokens, hidden]`` projection to the vocabulary.
        centroids: ``[centroids, hidden]``; ``None`` if the logits of all tokens are computed.
        ordering: ``[tokens]`` int64 tokens of the first group, of the second one, and so on;
            ``None`` without centroids.
    """

    text: Mapping[str, Tensor]
    entering: Tensor
    leaving: Tensor
    head: Tensor
    centroids: Tensor | None
    ordering: Tensor | None


def read_assistant(folder: Path) -> tuple[AssistantConfig, dict[str, Tensor]]:
    """Read the configuration and the tensors of an assistant.

    Raises:
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: the configuration is not supported, or a file is damaged.
    """
    return _parse(read_json(folder)), read_tensors(folder)


def checked_weights(config: AssistantConfig, tensors: Mapping[str, Tensor]) -> AssistantWeights:
    """Find the tensors of an assistant, and check their shapes.

    Raises:
        UnsupportedModelError: a tensor is missing or has another shape.
    """
    text, hidden = config.text, config.text.hidden_size

    def tensor(name: str, *shape: int) -> Tensor:
        found = tensors.get(name)
        if found is None or found.shape != shape:
            has = "is missing" if found is None else f"has the shape {list(found.shape)}"
            raise UnsupportedModelError(
                _ROLE, f"its tensor {name!r} {has}; {list(shape)} is expected"
            )
        return found

    embedding = tensor(_EMBEDDING, text.vocab_size, hidden)
    centroids = ordering = None
    if config.num_centroids is not None:
        centroids = tensor("masked_embedding.centroids.weight", config.num_centroids, hidden)
        ordering = tensor("masked_embedding.token_ordering", text.vocab_size).long()
        if not torch.equal(ordering.sort().values, torch.arange(text.vocab_size)):
            raise UnsupportedModelError(
                _ROLE, "its tensor 'masked_embedding.token_ordering' does not name each token once"
            )
    tied = text.tie_word_embeddings
    return AssistantWeights(
        {
            name.removeprefix("model."): each
            for name, each in tensors.items()
            if name.startswith("model.")
        },
        tensor("pre_projection.weight", hidden, 2 * config.target_hidden_size),
        tensor("post_projection.weight", config.target_hidden_size, hidden),
        embedding if tied else tensor("lm_head.weight", text.vocab_size, hidden),
        centroids,
        ordering,
    )


def _parse(config: Mapping[str, Any]) -> AssistantConfig:
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        raise _refused("text_config", "describes no layers")
    if config.get("quantization_config") is not None:
        raise _refused("quantization_config", "is not supported; name an assistant without it")
    kind = nested.get("model_type", "gemma4_text")
    if kind not in _TEXT_CONFIGS:
        raise _refused(
            "text_config.model_type", f"is {kind!r}, which is none of {', '.join(_TEXT_CONFIGS)}"
        )
    for name in _ABSENT:
        if nested.get(name):
            raise _refused(f"text_config.{name}", f"is {nested[name]!r}; no assistant has it")
    settings = {**dict.fromkeys(_ABSENT[:2], 0), **nested}
    try:
        text = _TEXT_CONFIGS[kind](**settings)
        text.num_kv_shared_layers = text.num_hidden_layers
        text.tie_word_embeddings = bool(config.get("tie_word_embeddings", True))
        other = set(text.layer_types) - set(_LAYER_TYPES)
    except Exception as error:  # the library raises anything for settings that it does not know
        raise _refused("text_config", f"cannot be read: {error}") from error
    if other:
        raise _refused("text_config.layer_types", f"contains {', '.join(sorted(other))}")
    size = _count(config, "backbone_hidden_size")
    if not config.get("use_ordered_embeddings", False):
        return AssistantConfig(text, size, None, 0)
    centroids = _count(config, "num_centroids", 2048)
    chosen = _count(config, "centroid_intermediate_top_k", 32)
    if text.vocab_size % centroids:
        raise _refused("num_centroids", f"is {centroids}, no divisor of {text.vocab_size} tokens")
    if chosen > centroids:
        raise _refused("centroid_intermediate_top_k", f"is {chosen}, of {centroids} centroids")
    return AssistantConfig(text, size, centroids, chosen)


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(name, f"must be a positive integer, got {value!r}")
    return value


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(_ROLE, f"its setting {name!r} {reason}")
