"""Quantised weights: how they are stored, and quantisation to 8 or 4 bits with torchao.

Only the weights of linear layers are quantised. Embeddings, norms and activations keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftwise.checkpoints.imports import quiet_import

# Inputs per scale at 4 bits.
_GROUP_SIZE = 32
# Attribute of a dequantised layer with its StoredRows, and of experts with their StoredExperts.
_STORED_ATTRIBUTE = "_stored_rows"
_EXPERTS_ATTRIBUTE = "_stored_experts"


@dataclass(frozen=True)
class BlockRows:
    """Rows of a tensor of a GGUF file, in the blocks of the file.

    Attributes:
        type_name, type_number: the type of the blocks in ggml.
        data: ``[stored rows, bytes]`` uint8, usually a view of the mapped file.
        num_inputs: numbers of a row.
        order: ``[rows]`` int64, which stored rows in which order; ``None`` for all.
        unit: what the numbers of the blocks are multiplied with; a float32.
        pieces: ``[pieces]`` int64, the order of the equal pieces of a stored row; ``None`` for that
            of the file.
    """

    type_name: str
    type_number: int
    data: NDArray[np.uint8]
    num_inputs: int
    order: Tensor | None = None
    unit: float = 1.0
    pieces: Tensor | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.data) if self.order is None else len(self.order)

    @property
    def description(self) -> str:
        """The type, for errors."""
        return self.type_name

    @property
    def chosen(self) -> NDArray[np.uint8]:
        """``[rows, bytes]`` the rows in their order."""
        return self.data if self.order is None else self.data[self.order.numpy()]

    def rows(self, first: int, end: int) -> BlockRows:
        """Some of the rows."""
        if self.order is None:
            return replace(self, data=self.data[first:end])
        return replace(self, order=self.order[first:end])

    def taken(self, which: Tensor) -> BlockRows:
        """The rows of given numbers ``[rows]`` int64."""
        return replace(self, order=which if self.order is None else self.order[which])

    def is_like(self, other: StoredRows) -> bool:
        """Whether other rows are stored in the same way."""
        return (
            isinstance(other, BlockRows)
            and other.type_number == self.type_number
            and other.unit == self.unit
            and self.pieces is None
            and other.pieces is None
        )

    def followed_by(self, other: StoredRows) -> BlockRows:
        """These rows and others of the same type."""
        assert isinstance(other, BlockRows)
        return replace(self, data=np.concatenate([self.chosen, other.chosen]), order=None)


def in_pieces(rows: Tensor, pieces: Tensor) -> Tensor:
    """Rows ``[rows, inputs]`` whose equal pieces are in another order ``[pieces]``."""
    return rows.view(len(rows), len(pieces), -1)[:, pieces].flatten(1)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight whose numbers are integers, with a scale per output and group of inputs.

    The weight of output o and input i of group g is ``numbers[o, i] * scales[o, g]``, less
    ``minimums[o, g]`` if there are minimums.

    Attributes:
        numbers: ``[out_features, in_features]`` int8.
        scales: ``[out_features, groups]`` float32. All groups have the same number of inputs.
        minimums: ``[out_features, groups]`` float32, or ``None``.
        bits: bits of a number. The numbers are ``smallest`` to ``smallest + 2**bits - 1``.
        smallest: the smallest number.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    bits: int = 8
    smallest: int = -128

    def __len__(self) -> int:
        """Number of outputs."""
        return len(self.numbers)

    @property
    def num_inputs(self) -> int:
        """Numbers of a row."""
        return self.numbers.shape[1]

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.numbers.shape[1] // self.scales.shape[1]

    @property
    def description(self) -> str:
        """The format, for errors."""
        return f"{self.bits} bits with a scale for {self.group} inputs"

    @property
    def has_scale_per_output(self) -> bool:
        """Whether the numbers have 8 bits and all inputs of an output have the same scale."""
        return self.bits == 8 and self.scales.shape[1] == 1 and self.minimums is None

    def dequantize(self) -> Tensor:
        """The weight ``[out_features, in_features]`` in float32."""
        grouped = self.numbers.view(*self.scales.shape, self.group)
        weight: Tensor = grouped * self.scales.unsqueeze(2)
        if self.minimums is not None:
            weight = weight - self.minimums.unsqueeze(2)
        return weight.flatten(1)

    def rows(self, first: int, end: int) -> QuantizedMatrix:
        """Some of the rows."""
        return self.taken(torch.arange(first, end))

    def taken(self, which: Tensor) -> QuantizedMatrix:
        """The rows of given numbers ``[rows]`` int64."""
        minimums = None if self.minimums is None else self.minimums[which]
        return replace(
            self, numbers=self.numbers[which], scales=self.scales[which], minimums=minimums
        )

    def is_like(self, other: StoredRows) -> bool:
        """Whether other rows are stored in the same way."""
        return (
            isinstance(other, QuantizedMatrix)
            and (other.bits, other.smallest, other.group) == (self.bits, self.smallest, self.group)
            and (other.minimums is None) == (self.minimums is None)
        )

    def followed_by(self, other: StoredRows) -> QuantizedMatrix:
        """These rows and others of the same kind."""
        assert isinstance(other, QuantizedMatrix)
        minimums = None
        if self.minimums is not None and other.minimums is not None:
            minimums = torch.cat([self.minimums, other.minimums])
        return replace(
            self,
            numbers=torch.cat([self.numbers, other.numbers]),
            scales=torch.cat([self.scales, other.scales]),
            minimums=minimums,
        )


StoredRows: TypeAlias = BlockRows | QuantizedMatrix
# The rows of all experts of a layer: of the gate and the up projection, or of one projection.
StoredExperts: TypeAlias = tuple[BlockRows, ...]


def quantize_linear_layers(model: nn.Module, quantization: str) -> None:
    """Quantise the linear layers of a model in place. Their weights become torchao tensors.

    ``"int8"`` has one scale per output. ``"int4"`` has a scale and a zero point per output and
    group of 32 inputs, or per output where the number of inputs is not a multiple of 32. Its 16
    numbers cover the range of the group's weights. The head has 8 bits, as in common 4-bit GGUF
    files. A head tied to the embedding gets its own weight, and the embedding is not changed.

    Args:
        model: a loaded model.
        quantization: ``"int8"`` or ``"int4"``.
    """
    with quiet_import():
        from torchao.quantization import (
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            MappingType,
            PerGroup,
            quantize_,
        )

    _replace_conv1d(model)

    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None

    def is_head(module: nn.Module, name: str) -> bool:
        return module is head

    def in_layers(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module is not head

    def in_groups(module: nn.Module, name: str) -> bool:
        return in_layers(module, name) and _has_groups(module)

    def whole(module: nn.Module, name: str) -> bool:
        return in_layers(module, name) and not _has_groups(module)

    if quantization == "int8":
        quantize_(model, Int8WeightOnlyConfig())
    elif quantization == "int4":
        four_bits: torch.dtype = torch.int4  # type: ignore[attr-defined]
        asymmetric = partial(IntxWeightOnlyConfig, four_bits, mapping_type=MappingType.ASYMMETRIC)
        quantize_(model, Int8WeightOnlyConfig(), is_head)
        quantize_(model, asymmetric(granularity=PerGroup(_GROUP_SIZE)), in_groups)
        quantize_(model, asymmetric(), whole)
    else:
        raise ValueError(f"unknown quantisation {quantization!r}")


def _has_groups(layer: nn.Module) -> bool:
    """Whether a linear layer's inputs form whole groups."""
    return isinstance(layer, nn.Linear) and layer.in_features % _GROUP_SIZE == 0


def expand_weights(model: nn.Module) -> None:
    """Dequantise a model's weights to its dtype, in place.

    torchao has no CPU kernel for quantised weights and dequantises them at every call. Dequantised
    once, they can be packed, and the model has the speed and size of the unquantised one. The
    integers are kept as well (:func:`stored_rows`), for the native kernels that compute with
    them.
    """
    for layer in _quantized_layers(model):
        weight: Any = layer.weight
        matrix = _matrix_of(weight)
        if matrix is not None:
            keep_stored(layer, [matrix])
        layer.weight = nn.Parameter(weight.dequantize(), requires_grad=False)


def keep_stored(layer: nn.Module, rows: Sequence[StoredRows]) -> None:
    """Keep what a layer's weight is dequantised from: its rows, in parts that follow each other.

    Args:
        layer: a linear layer, or an embedding.
        rows: the parts.
    """
    object.__setattr__(layer, _STORED_ATTRIBUTE, tuple(rows))


def stored_rows(layer: nn.Module) -> tuple[StoredRows, ...]:
    """What a layer's weight is dequantised from; empty if that is not known."""
    found: tuple[StoredRows, ...] = getattr(layer, _STORED_ATTRIBUTE, ())
    return found


def keep_stored_experts(layer: nn.Module, weights: Mapping[str, StoredExperts]) -> None:
    """Keep what the weights of a layer of experts are made of, by the names of its parameters."""
    object.__setattr__(layer, _EXPERTS_ATTRIBUTE, dict(weights))


def stored_experts(layer: nn.Module) -> dict[str, StoredExperts]:
    """What the weights of a layer of experts are made of; empty if that is not known."""
    found: dict[str, StoredExperts] = getattr(layer, _EXPERTS_ATTRIBUTE, {})
    return found


def has_stored_weights(model: nn.Module) -> bool:
    """Whether weights of a model exist as :func:`stored_rows` only, and are meta tensors."""
    return any(stored_rows(module) and _weight_of(module).is_meta for module in model.modules())


def _weight_of(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


def quantized_matrix(layer: nn.Linear) -> QuantizedMatrix | None:
    """The matrix that a layer's weight was dequantised from; ``None`` if there is not one."""
    match stored_rows(layer):
        case (QuantizedMatrix() as matrix,):
            return matrix
    return None


def forget_stored(layer: nn.Module) -> None:
    """Free what :func:`stored_rows` and :func:`stored_experts` return."""
    for attribute in (_STORED_ATTRIBUTE, _EXPERTS_ATTRIBUTE):
        if hasattr(layer, attribute):
            object.__delattr__(layer, attribute)


def has_quantized_weights(model: nn.Module) -> bool:
    """Whether any linear layer has a torchao tensor as its weight."""
    return any(True for _ in _quantized_layers(model))


def _quantized_layers(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            yield module


def _matrix_of(weight: Any) -> QuantizedMatrix | None:
    """The integers and scales of one of torchao's weights; ``None`` for other kinds."""
    with quiet_import():
        from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor

    if isinstance(weight, Int8Tensor) and weight.scale.numel() == len(weight.qdata):
        return QuantizedMatrix(weight.qdata, weight.scale.float().view(-1, 1))
    if isinstance(weight, IntxUnpackedToInt8Tensor):
        scales = weight.scale.float().view(len(weight.qdata), -1)
        zeros = weight.zero_point.float().view_as(scales)
        minimums = zeros * scales if bool(zeros.any()) else None
        return QuantizedMatrix(weight.qdata, scales, minimums, bits=4, smallest=-8)
    return None


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
