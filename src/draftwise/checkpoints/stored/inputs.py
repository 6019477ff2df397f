"""Linear layers whose inputs are quantised when they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_INT8 = torch.iinfo(torch.int8)
_FLOAT8 = torch.finfo(torch.float8_e4m3fn)


@dataclass(frozen=True)
class InputQuantization:
    """How the inputs of a layer are quantised, as compressed-tensors defines it.

    Attributes:
        is_float: whether the numbers are 8-bit floating-point ones, not integers.
        is_dynamic: whether each token has a scale of its own, by its largest number. Otherwise the
            layer has a scale that is stored.
    """

    is_float: bool
    is_dynamic: bool

    def apply(self, inputs: Tensor, scale: Tensor | None) -> Tensor:
        """Quantise and expand inputs.

        Args:
            inputs: ``[..., in_features]``.
            scale: the layer's scale; ``None`` where each token has one.
        """
        if scale is None:
            largest = inputs.abs().amax(-1, keepdim=True)
            scale = largest / (_FLOAT8.max if self.is_float else (_INT8.max - _INT8.min) / 2)
            # A token of zeros stays one.
            scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        limits = _FLOAT8 if self.is_float else _INT8
        numbers = (inputs / scale).clamp(limits.min, limits.max)
        if self.is_float:
            numbers = numbers.to(torch.float8_e4m3fn).to(inputs.dtype)
        else:
            numbers = numbers.round()
        return numbers * scale


class QuantizedInputs(nn.Module):
    """A linear layer that quantises its inputs.

    Attributes:
        linear: the layer.
    """

    def __init__(
        self, linear: nn.Linear, quantization: InputQuantization, scale: Tensor | None
    ) -> None:
        """Wrap a layer.

        Args:
            linear: the layer, with expanded weights.
            quantization: how its inputs are quantised.
            scale: the scale of its inputs; ``None`` where each token has one.
        """
        super().__init__()
        self.linear: Any = linear
        self._quantization = quantization
        self.register_buffer("scale", scale)

    @property
    def weight(self) -> Tensor:
        """``[out_features, in_features]`` the layer's weight."""
        weight: Tensor = self.linear.weight
        return weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        scale = self.scale
        assert scale is None or isinstance(scale, Tensor)
        outputs: Tensor = self.linear(self._quantization.apply(inputs, scale))
        return outputs


def quantizes_inputs(model: nn.Module) -> bool:
    """Whether any layer of a model quantises its inputs."""
    return any(isinstance(module, QuantizedInputs) for module in model.modules())
