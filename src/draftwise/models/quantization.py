"""Weights of 8 or 4 bits through torchao, of a target or of the draft as a companion.

Only weights are quantised, those of linear layers; embeddings, norms and activations keep their
type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from draftwise.models.imports import quiet_import

# Inputs that share a scale at 4 bits.
_GROUP_SIZE = 32
# Attribute of an expanded layer.
_NUMBERS = "_numbers_of_8_bits"


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight as whole numbers: ``numbers * scales.unsqueeze(1)``.

    Attributes:
        numbers: ``[out_features, in_features]`` int8.
        scales: ``[out_features]`` float32.
    """

    numbers: Tensor
    scales: Tensor


def quantize_linear_layers(model: nn.Module, quantization: str) -> None:
    """Quantise the linear layers of a model in place; their weights become torchao's tensors.

    ``"int8"`` has one scale per output, ``"int4"`` one per output and group of 32 inputs (one per
    output where 32 does not divide the inputs). A head tied to the embedding gets a weight of its
    own; the embedding stays as it is.

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
    """Write quantised weights out in the type that is computed in: the same model, plain.

    torchao has no kernel for the CPU that multiplies by quantised weights, it expands them at
    every call. Expanded once they can be packed, and the model runs at the unquantised one's speed
    and size. Of weights of 8 bits the numbers are kept beside (:func:`quantized_matrix`), for
    kernels that know what to do with them.
    """
    for layer in _quantized_layers(model):
        weight: Any = layer.weight
        if _has_scale_per_output(weight):
            numbers = QuantizedMatrix(weight.qdata, weight.scale.float().flatten())
            object.__setattr__(layer, _NUMBERS, numbers)
        layer.weight = nn.Parameter(weight.dequantize(), requires_grad=False)


def quantized_matrix(layer: nn.Linear) -> QuantizedMatrix | None:
    """What the weight of a layer was before it was expanded, if it had 8 bits."""
    found: QuantizedMatrix | None = getattr(layer, _NUMBERS, None)
    return found


def forget_quantized(layer: nn.Linear) -> None:
    """Give back what :func:`quantized_matrix` would say."""
    if hasattr(layer, _NUMBERS):
        object.__delattr__(layer, _NUMBERS)


def has_quantized_weights(model: nn.Module) -> bool:
    """Whether some linear layer holds a tensor of torchao's."""
    return any(True for _ in _quantized_layers(model))


def _quantized_layers(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            yield module


def _has_scale_per_output(weight: Any) -> bool:
    """Whether it is torchao's weight of 8 bits around zero, with one scale per output."""
    with quiet_import():
        from torchao.quantization import Int8Tensor

    return isinstance(weight, Int8Tensor) and weight.scale.numel() == len(weight.qdata)


def _replace_conv1d(model: nn.Module) -> None:
    """GPT-2's name for a linear layer is not known to torchao."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                weight, bias = cast(Tensor, child.weight), cast(Tensor, child.bias)
                inputs, outputs = weight.shape
                linear = nn.Linear(inputs, outputs, device="meta", dtype=weight.dtype)
                linear.weight = nn.Parameter(weight.detach().T.contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
                setattr(parent, name, linear)
