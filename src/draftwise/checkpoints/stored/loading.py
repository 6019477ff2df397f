"""Loading of a checkpoint into a model of ``transformers``."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from draftwise.checkpoints.hub import checkpoint_folder
from draftwise.checkpoints.stored.expansion import ExpandedWeights
from draftwise.checkpoints.stored.files import CheckpointFiles
from draftwise.checkpoints.stored.quantization import expansion_of, stored_quantization


def load_checkpoint(
    model_class: Any,
    location: str,
    config: Any,
    role: str,
    name: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model as ``from_pretrained`` does, with quantised weights expanded.

    Args:
        model_class: an automatic class of ``transformers``, or the class of a model.
        location: a folder or a hub id.
        config: the model's configuration.
        role: the model's role; named in errors.
        name: the user's name for the model.
        dtype: dtype that the weights are converted to.
        trust_remote_code: whether to run code that comes with the model.
        options: other keyword arguments of ``from_pretrained``.

    Returns:
        The model, and the report of ``from_pretrained`` about the tensors.

    Raises:
        UnsupportedModelError: the weights are quantised in a way that is not supported.
        Exception: whatever ``transformers`` raises.
    """
    settings = stored_quantization(config, location)
    options = {**options, "dtype": dtype, "output_loading_info": True}
    if settings is None:
        loaded: tuple[nn.Module, dict[str, Any]] = model_class.from_pretrained(
            location, config=config, trust_remote_code=trust_remote_code, **options
        )
        return loaded
    expansion = expansion_of(settings, role, name)
    options.pop("use_safetensors", None)
    config = _without_quantization(config)
    if not issubclass(model_class, PreTrainedModel):
        with torch.device("meta"):
            empty = model_class.from_config(config, trust_remote_code=trust_remote_code)
        model_class, config = type(empty), empty.config
    folder = checkpoint_folder(location, role)
    weights = ExpandedWeights(CheckpointFiles(folder), expansion, role, name)
    model, report = model_class.from_pretrained(
        None, config=config, state_dict=weights.tensors, **options
    )
    weights.quantize_inputs(model)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, report


def _without_quantization(config: Any) -> Any:
    plain = copy.deepcopy(config)
    for each in (plain, plain.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return plain
