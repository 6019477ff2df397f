"""Layouts of weights that are stored as numbers of 8 or 4 bits, each multiplied by a scale.

There is a scale for the whole weight, for each of its outputs, or for each block.
"""

from __future__ import annotations

import json
from functools import partial

import torch
from torch import Tensor

from draftwise.checkpoints.stored.layouts import Layout, Parts

# A block is the number of outputs and inputs that share a scale.
Block = tuple[int, int]

# Magnitudes of the floating-point numbers of 4 bits with an exponent of 2 bits, by their codes.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_QUANT_STATE = ".weight.quant_state.bitsandbytes__"


def fp8_blocks(block: Block | None) -> Layout:
    """The layout of DeepSeek-V3's weights, which ``transformers`` calls fine-grained FP8."""
    expand = partial(_float8, end="_scale_inv", block=block)
    return Layout("_scale_inv", ("",), (), "", expand)


def _float8(parts: Parts, end: str, block: Block | None) -> Tensor:
    numbers = parts[""]
    if not numbers.dtype.is_floating_point:
        raise ValueError(f"it has scales, and its numbers are {_name(numbers)}, not float8")
    return numbers.float() * _spread(_scales(parts[end]), numbers.shape, block)


def with_scale(block: Block | None = None) -> Layout:
    """A layout of ``weight`` and ``weight_scale``: 8-bit numbers, or 4-bit numbers in pairs.

    It is that of ModelOpt, of FBGEMM, and of compressed-tensors' unpacked formats.
    """
    optional = (".weight_zero_point", ".weight_scale_2")
    expand = partial(_with_scale, weight=".weight", block=block)
    return Layout(".weight_scale", (".weight",), optional, ".weight", expand)


def packed_fp4() -> Layout:
    """The layout of compressed-tensors for pairs of 4-bit floating-point numbers."""
    optional = (".weight_global_scale",)
    expand = partial(_with_scale, weight=".weight_packed", block=None)
    return Layout(".weight_packed", (".weight_scale",), optional, ".weight", expand)


def _with_scale(parts: Parts, weight: str, block: Block | None) -> Tensor:
    stored, scales = parts[weight], _scales(parts[".weight_scale"])
    numbers = _fp4_numbers(stored) if stored.dtype == torch.uint8 else stored.float()
    if ".weight_scale_2" in parts:
        scales = scales * parts[".weight_scale_2"].float()
    if ".weight_global_scale" in parts:
        scales = scales / parts[".weight_global_scale"].float()
    if ".weight_zero_point" in parts:
        zeros = parts[".weight_zero_point"].float()
        numbers = numbers - _spread(zeros, numbers.shape, block)
    return numbers * _spread(scales, numbers.shape, block)


def torchao() -> Layout:
    """The layout of torchao's weights of 8-bit numbers, also where they need fewer bits."""
    optional = ("._weight_zero_point",)
    return Layout("._weight_qdata", ("._weight_scale",), optional, ".weight", _torchao)


def _torchao(parts: Parts) -> Tensor:
    numbers, scales = parts["._weight_qdata"].float(), parts["._weight_scale"].float()
    if "._weight_zero_point" in parts:
        zeros = parts["._weight_zero_point"].float()
        numbers = numbers - _spread(zeros, numbers.shape, None)
    return numbers * _spread(scales, numbers.shape, None)


def mxfp4_experts() -> Layout:
    """The layout of gpt-oss' experts: blocks of 32 inputs, each with an exponent."""
    return Layout("_blocks", ("_scales",), (), "", _mxfp4_experts)


def _mxfp4_experts(parts: Parts) -> Tensor:
    numbers = _fp4_numbers(parts["_blocks"])
    weight = (numbers * _scales(parts["_scales"]).unsqueeze(-1)).flatten(-2)
    # The model multiplies by experts of [inputs, outputs].
    return weight.transpose(-1, -2)


def bitsandbytes_4bit() -> Layout:
    """The layout of bitsandbytes' 4-bit weights: codes of a table of 16 values, in blocks."""
    optional = (
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *(_QUANT_STATE + kind for kind in ("nf4", "fp4")),
    )
    required = (".weight", ".weight.quant_map")
    return Layout(".weight.absmax", required, optional, ".weight", _bitsandbytes_4bit)


def _bitsandbytes_4bit(parts: Parts) -> Tensor:
    states = [tensor for end, tensor in parts.items() if end.startswith(_QUANT_STATE)]
    if len(states) != 1:
        raise ValueError("its type and its shape are not stored")
    state = json.loads(bytes(states[0].tolist()))
    largest = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:
        factors = parts[".weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])
        values = parts[".weight.nested_quant_map"][largest.long()]
        largest = values * factors[: len(values)] + state["nested_offset"]
    codes = parts[".weight"].contiguous().view(torch.uint8).flatten()
    pairs = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()
    shape = torch.Size(state["shape"])
    values = parts[".weight.quant_map"].float()[pairs[: shape.numel()].long()]
    scales = largest.float().repeat_interleave(state["blocksize"])[: shape.numel()]
    # bitsandbytes computes with weights in the type that was quantised.
    dtype = getattr(torch, state["dtype"])
    weight: Tensor = (values * scales).to(dtype).float()
    return weight.view(shape)


def _fp4_numbers(pairs: Tensor) -> Tensor:
    """``[..., 2n]`` float32 of bytes ``[..., n]``, the number in the low half first."""
    table = torch.tensor([*_FP4, *(-each for each in _FP4)])
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    return table[codes.int()]


def _scales(stored: Tensor) -> Tensor:
    """Scales in float32."""
    if stored.dtype == torch.uint8:  # exponents of 2
        stored = stored.view(torch.float8_e8m0fnu)
    return stored.float()


def _spread(scales: Tensor, shape: torch.Size, block: Block | None) -> Tensor:
    """Scales in a shape that can be multiplied with a weight of a shape.

    Raises:
        ValueError: the scales do not divide such a weight into blocks.
    """
    if scales.numel() == 1:
        return scales.view(())
    if scales.dim() == len(shape) + 2:  # Blocks with their inner dimensions, of size 1.
        scales = scales.squeeze(-1).squeeze(-2)
    elif scales.dim() == 1:
        scales = scales.unsqueeze(1)
    if scales.dim() != len(shape) or scales.shape[:-2] != shape[:-2]:
        raise ValueError(f"its scales have the shape {list(scales.shape)} and it has {list(shape)}")
    for dim in (-2, -1):
        size, count = shape[dim], scales.shape[dim]
        if count in (1, size):
            continue
        if block is not None and -(-size // block[dim]) == count:
            length = block[dim]
        elif size % count == 0:
            length = size // count
        else:
            raise ValueError(f"{count} scales do not divide {size} numbers into blocks")
        scales = scales.repeat_interleave(length, dim).narrow(dim, 0, size)
    return scales


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
