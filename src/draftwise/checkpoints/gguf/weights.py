"""The weights of a model in a GGUF file, expanded, and the blocks that they were expanded from."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draftwise.checkpoints.gguf.configuration import is_tied
from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.tensors import HEAD, Source, sources
from draftwise.checkpoints.quantization import QuantizedMatrix, keep_quantized
from draftwise.checkpoints.rotary import rotary_settings
from draftwise.checkpoints.support import ATTENTION_NAME


def load_weights(file: GgufFile, config: Any, dtype: torch.dtype) -> nn.Module:
    """Load a model with expanded weights.

    Args:
        file: the file.
        config: the model's configuration.
        dtype: data type of the weights.

    Raises:
        UnsupportedModelError: a tensor is missing, unknown, of another shape, or of a type that
            cannot be expanded.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    shapes = {name: each.shape for name, each in empty.state_dict().items()}
    weights = {}
    for name, source in sources(file, shapes).items():
        if name == HEAD and is_tied(file):
            continue
        numbers = source.read(file, shapes[name])
        # Some models keep norms in float32.
        weights[name] = numbers if numbers.ndim == 1 else numbers.to(dtype)
    model: nn.Module
    model, report = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
    )
    _check_rotary(file, model)
    lost = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    if lost:
        raise file.error(f"cannot be loaded by transformers: {lost[0]!r} is not a parameter")
    return model


def _check_rotary(file: GgufFile, model: Any) -> None:
    """Refuse a model with one rotary embedding for a configuration of several."""
    by_type = len(rotary_settings(model.config.rope_parameters)) > 1
    if by_type and "layer_type" not in signature(model.model.rotary_emb.forward).parameters:
        raise file.error(
            "has other rotary embeddings in layers with a window, which this version of "
            "transformers does not compute"
        )


def keep_blocks(file: GgufFile, model: nn.Module) -> None:
    """Keep the integers and scales of the blocks of a model's linear layers.

    They are kept for :func:`draftwise.checkpoints.quantization.quantized_matrix`. A layer keeps
    nothing if its tensor is not stored in blocks of a known type.

    Args:
        file: the file that the model was loaded from.
        model: the model, with expanded weights.
    """
    names = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    found = sources(file, model.state_dict())
    for name, module in names.items():
        matrix = _matrix(file, found[f"{name}.weight"])
        if matrix is not None and matrix.numbers.shape == module.weight.shape:
            keep_quantized(module, matrix)


def _matrix(file: GgufFile, source: Source) -> QuantizedMatrix | None:
    """The integers and scales of a weight; ``None`` if it is not rows of blocks of one type."""
    if source.join is not None or any(part.scale is not None for part in source.parts):
        return None
    return file.blocks([(part.tensor, part.rows) for part in source.parts])
