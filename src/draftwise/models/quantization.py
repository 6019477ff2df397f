"""Quantisation of a model's weights to 8 or 4 bits with torchao.

Only the weights of linear layers are quantised. Embeddings, norms and activations keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from draftwise.models.imports import quiet_import

# Inputs per scale at 4 bits.
_GROUP_SIZE = 32
# Attribute of a dequantised layer that holds its QuantizedMatrix.
_MATRIX_ATTRIBUTE = "_int8_matrix"


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight quantised to integers: ``numbers * scales.unsqueeze(1)``.

    Attributes:
        numbers: ``[out_features, in_features]`` int8.
        scales: ``[out_features]`` float32.
    """

    numbers: Tensor
    scales: Tensor


def quantize_linear_layers(model: nn.Module, quantization: str) -> None:
    """Quantise the linear layers of a model in place. Their weights become torchao tensors.

    ``"int8"`` has one scale per output. ``"int4"`` has one per output and group of 32 inputs, or
    one per output where the number of inputs is not a multiple of 32. A head tied to the embedding
    gets its own weight, and the embedding is not changed.

    Args:
        model: a loaded model.
        quantization: ``"int8"`` or ``"int4"``.
    """
    with quiet_import():
        from torchao.quantization import (
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            PerGroup,
            quantize_,
        )

    _replace_conv1d(model)

    def in_groups(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module.in_features % _GROUP_SIZE == 0

    def whole(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not in_groups(module, name)

    if quantization == "int8":
        quantize_(model, Int8WeightOnlyConfig())
    elif quantization == "int4":
        four_bits: torch.dtype = torch.int4  # type: ignore[attr-defined]
        quantize_(model, IntxWeightOnlyConfig(four_bits, PerGroup(_GROUP_SIZE)), in_groups)
        quantize_(model, IntxWeightOnlyConfig(four_bits), whole)
    else:
        raise ValueError(f"unknown quantisation {quantization!r}")


def expand_weights(model: nn.Module) -> None:
    """Dequantise a model's weights to its dtype, in place.

    torchao has no CPU kernel for quantised weights and dequantises them at every call. Dequantised
    once, they can be packed, and the model has the speed and size of the unquantised one. The
    integers of 8-bit weights are kept as well (:func:`quantized_matrix`), for the native kernels
    that compute with them.
    """
    for layer in _quantized_layers(model):
        weight: Any = layer.weight
        if _has_scale_per_output(weight):
            numbers = QuantizedMatrix(weight.qdata, weight.scale.float().flatten())
            object.__setattr__(layer, _MATRIX_ATTRIBUTE, numbers)
        layer.weight = nn.Parameter(weight.dequantize(), requires_grad=False)


def quantized_matrix(layer: nn.Linear) -> QuantizedMatrix | None:
    """A layer's weight before it was dequantised; ``None`` unless it had 8 bits."""
    found: QuantizedMatrix | None = getattr(layer, _MATRIX_ATTRIBUTE, None)
    return found


def forget_quantized(layer: nn.Linear) -> None:
    """Free the matrix that :func:`quantized_matrix` returns."""
    if hasattr(layer, _MATRIX_ATTRIBUTE):
        object.__delattr__(layer, _MATRIX_ATTRIBUTE)


def has_quantized_weights(model: nn.Module) -> bool:
    """Whether any linear layer has a torchao tensor as its weight."""
    return any(True for _ in _quantized_layers(model))


def _quantized_layers(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            yield module


def _has_scale_per_output(weight: Any) -> bool:
    """Whether a weight is torchao's symmetric 8-bit one with a scale per output."""
    with quiet_import():
        from torchao.quantization import Int8Tensor

    return isinstance(weight, Int8Tensor) and weight.scale.numel() == len(weight.qdata)


def _replace_conv1d(model: nn.Module) -> None:
    """Replace GPT-2's ``Conv1D``, which torchao does not support, by ``nn.Linear``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                weight, bias = cast(Tensor, child.weight), cast(Tensor, child.bias)
                inputs, outputs = weight.shape
                linear = nn.Linear(inputs, outputs, device="meta", dtype=weight.dtype)
                linear.weight = nn.Parameter(weight.detach().T.contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
                setattr(parent, name, linear)
