"""Loading of an assistant of Gemma 4 for its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4TextModel, Gemma4UnifiedTextModel

from draftwise.checkpoints.fingerprint import tensors_fingerprint
from draftwise.checkpoints.heads.assistant import (
    AssistantConfig,
    AssistantWeights,
    checked_weights,
    read_assistant,
)
from draftwise.checkpoints.heads.origin import warn_of_other_target
from draftwise.checkpoints.support import own_failure
from draftwise.errors import UnsupportedModelError
from draftwise.models.heads.assistant import ASSISTANT_ATTENTION, AssistantModel, AssistantSpec
from draftwise.models.loading import LoadedModel
from draftwise.models.pretrained import PretrainedModel

_ROLE = "draft"
_MODELS = {"gemma4_text": Gemma4TextModel, "gemma4_unified_text": Gemma4UnifiedTextModel}
_SLIDING = "sliding_attention"


def load_assistant(name: str, folder: Path, target: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    """Load an assistant for a target, on whose device it runs.

    Args:
        name: the user's name for it.
        folder: its folder.
        target: the target.
        dtype: dtype that the weights are converted to.

    Raises:
        ModelNotFoundError: the folder contains no weights.
        UnsupportedModelError: the assistant is not supported, its files are damaged, or it was made
            for another target.
    """
    config, tensors = read_assistant(folder)
    text = _text_of(target)
    sources = _sources(config, target, text)
    warn_of_other_target(name, folder, target.name, target.fingerprint)
    device = target.model.device
    weights = checked_weights(
        config,
        {
            name: each.to(device, dtype) if each.is_floating_point() else each
            for name, each in tensors.items()
        },
    )
    groups = None
    if weights.ordering is not None and config.num_centroids is not None:
        groups = weights.ordering.view(config.num_centroids, -1).to(device)
    window = config.text.sliding_window
    spec = AssistantSpec(
        _text_model(config, weights, device),
        weights.entering,
        weights.leaving,
        weights.head,
        groups,
        weights.centroids,
        config.num_chosen,
        text.hidden_size**0.5,
        sources,
        # As transformers counts: the window in front of the newest key, and this key.
        {kind: window + 1 if kind == _SLIDING else None for kind in sources},
    )
    computed = [config.num_centroids, config.num_chosen, config.text.to_dict()]
    settings = json.dumps(computed, sort_keys=True, default=str)
    return LoadedModel(
        name,
        AssistantModel(spec, target.model),
        None,
        target.max_model_len,
        frozenset(),
        sum(each.numel() for each in tensors.values() if each.is_floating_point()),
        tensors_fingerprint(settings, tensors),
    )


def _text_of(target: LoadedModel) -> Any:
    """The configuration of a target's layers.

    Raises:
        UnsupportedModelError: it is no Gemma 4.
    """
    model = target.model
    if isinstance(model, PretrainedModel):
        module: Any = model.module
        text = module.config.get_text_config()
        if text.model_type in _MODELS:
            return text
    raise UnsupportedModelError(
        _ROLE,
        f"an assistant reads the keys and values of a Gemma 4 target; the model_type of "
        f"{target.name!r} is {model.family!r}",
    )


def _sources(config: AssistantConfig, target: LoadedModel, text: Any) -> dict[str, int]:
    """The target's layer that layers of each kind read: the last one with keys of its own.

    Raises:
        UnsupportedModelError: the assistant was made for another target.
    """
    own, model = config.text, target.model
    expected = {
        "backbone_hidden_size": (config.target_hidden_size, "hidden_size", model.hidden_size),
        "text_config.vocab_size": (own.vocab_size, "vocab_size", model.vocab_size),
    }
    if _SLIDING in own.layer_types:
        expected["text_config.sliding_window"] = (
            own.sliding_window,
            "sliding_window",
            text.sliding_window,
        )
    for setting, (found, of_target, wanted) in expected.items():
        if found != wanted:
            raise _other_target(setting, found, f"{of_target} of the target is {wanted}")
    with_keys = text.layer_types[: text.num_hidden_layers - (text.num_kv_shared_layers or 0)]
    sources = {}
    for index, kind in enumerate(own.layer_types):
        if kind not in with_keys:
            raise _other_target(
                "text_config.layer_types", kind, "the target has no such layer with keys of its own"
            )
        source = sources[kind] = len(with_keys) - 1 - with_keys[::-1].index(kind)
        layer, of_own = model.layers[source], own.per_layer_config[index]
        for setting, found, wanted in (
            ("head_dim", of_own.head_dim, layer.key_size),
            ("num_key_value_heads", of_own.num_key_value_heads, layer.num_heads),
        ):
            if found != wanted:
                raise _other_target(
                    f"text_config.{setting}",
                    found,
                    f"in layers of {kind}, and in layer {source} of the target it is {wanted}",
                )
    return sources


def _text_model(config: AssistantConfig, weights: AssistantWeights, device: torch.device) -> Any:
    """The layers and the final norm.

    Raises:
        UnsupportedModelError: they cannot be built, or weights are missing, left over or misshapen.
    """
    own = config.text
    own._attn_implementation = ASSISTANT_ATTENTION
    try:
        with torch.no_grad():
            model: Any = _MODELS[own.model_type](own)
            # Nothing is converted: what the library computes in float32 stays so.
            missing, left = model.load_state_dict(weights.text, strict=False, assign=True)
    except Exception as error:  # the library raises anything for settings that it does not know
        raise UnsupportedModelError(
            _ROLE, f"the assistant cannot be built: {own_failure(error)}"
        ) from error
    for what, names in (("are missing", missing), ("belong to no layer", left)):
        if names:
            raise UnsupportedModelError(_ROLE, f"tensors {what}: {', '.join(sorted(names))}")
    return model.to(device).eval()


def _other_target(setting: str, found: object, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        _ROLE,
        f"the assistant was made for another target: its setting {setting!r} is {found!r}, and "
        f"{expected}",
    )
