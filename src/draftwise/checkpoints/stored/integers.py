"""Layouts of weights that are stored as integers: GPTQ, AWQ and compressed-tensors.

An integer q of input i and output o stands for the weight (q - zero point) · scale, with a zero
point and a scale per output and group of inputs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from draftwise.checkpoints.stored.layouts import Layout, Parts, unpack

_WORD = 32
_GPTQ_BITS = (2, 3, 4, 8)
# AWQ packs each 8 numbers of 4 bits in this order, the lowest bits first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_BITS = 4


def gptq(group: int, is_first_version: bool) -> Layout:
    """The layout of GPTQ (Frantar et al. 2022) in the files of AutoGPTQ and GPTQModel.

    Args:
        group: inputs of a group, for layers without ``g_idx``, the group of each input; -1 for all.
        is_first_version: whether zero points are stored less one.
    """
    expand = partial(_gptq, group=group, is_first_version=is_first_version)
    return Layout(".qweight", (".qzeros", ".scales"), (".g_idx",), ".weight", expand)


def _gptq(parts: Parts, group: int, is_first_version: bool) -> Tensor:
    words, scales = parts[".qweight"], parts[".scales"]
    num_groups, num_outputs = scales.shape
    bits = parts[".qzeros"].shape[1] * _WORD // num_outputs
    if bits not in _GPTQ_BITS:
        raise ValueError(f"its numbers have {bits} bits")
    num_inputs = words.shape[0] * _WORD // bits
    groups = parts.get(".g_idx")
    if groups is None:
        groups = _consecutive_groups(num_inputs, num_groups, group)
    numbers = unpack(words.T, bits, num_inputs)
    zeros = _zero_points(parts[".qzeros"], bits, num_outputs, is_first_version)
    return _expand(numbers, scales.T, zeros.T, groups)


def _consecutive_groups(num_inputs: int, num_groups: int, group: int = -1) -> Tensor:
    """The group of each input; layers may have other groups than the settings say."""
    if group < 0 or -(-num_inputs // group) != num_groups:
        group, rest = divmod(num_inputs, num_groups)
        if rest:
            raise ValueError(f"{num_groups} scales do not divide {num_inputs} inputs into groups")
    return torch.arange(num_inputs) // group


def _expand(numbers: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor) -> Tensor:
    """Expand integers.

    Args:
        numbers: ``[outputs, inputs]``.
        scales: ``[outputs, groups]``.
        zeros: ``[outputs, groups]`` zero points; ``None`` for none.
        groups: ``[inputs]`` the group of each input.
    """
    num_inputs, num_groups = numbers.shape[1], scales.shape[1]
    scales = scales.float()
    zeros = None if zeros is None else zeros.float()
    weight = numbers.float()
    groups = groups.long()
    if num_inputs % num_groups == 0 and torch.equal(
        groups, torch.arange(num_inputs) // (num_inputs // num_groups)
    ):
        # Much faster than a scale and a zero point for each number.
        values = weight.view(len(numbers), num_groups, -1)
        scales = scales.unsqueeze(2)
        zeros = None if zeros is None else zeros.unsqueeze(2)
    else:
        values, scales = weight, scales[:, groups]
        zeros = None if zeros is None else zeros[:, groups]
    if zeros is not None:
        values -= zeros
    values *= scales
    return weight


def _zero_points(words: Tensor, bits: int, count: int, is_first_version: bool) -> Tensor:
    if is_first_version and _WORD % bits == 0:
        # GPTQModel subtracted 1 from all numbers of a word at once, with borrows.
        words = words + sum(1 << at for at in range(0, _WORD, bits))
    zeros = unpack(words, bits, count)
    if is_first_version and _WORD % bits:
        zeros = zeros + 1 & (1 << bits) - 1
    return zeros


def awq() -> Layout:
    """The layout of AWQ (Lin et al. 2023) for matrix products, called GEMM."""
    return Layout(".qweight", (".qzeros", ".scales"), (), ".weight", _awq)


def _awq(parts: Parts) -> Tensor:
    scales = parts[".scales"]
    num_groups, num_outputs = scales.shape
    numbers, zeros = (_in_awq_order(parts[end], num_outputs).T for end in (".qweight", ".qzeros"))
    groups = _consecutive_groups(numbers.shape[1], num_groups)
    return _expand(numbers.contiguous(), scales.T, zeros, groups)


def _in_awq_order(words: Tensor, count: int) -> Tensor:
    packed = unpack(words, _AWQ_BITS, count).view(len(words), -1, len(_AWQ_ORDER))
    numbers = torch.empty_like(packed)
    numbers[..., list(_AWQ_ORDER)] = packed
    return numbers.flatten(-2)


def packed(bits: tuple[int, ...]) -> Layout:
    """The layout of compressed-tensors that is called ``pack-quantized``.

    Args:
        bits: the numbers of bits that a layer's numbers may have.
    """
    optional = (".weight_zero_point", ".weight_g_idx")
    expand = partial(_packed, bits=bits)
    return Layout(".weight_packed", (".weight_scale", ".weight_shape"), optional, ".weight", expand)


def _packed(parts: Parts, bits: tuple[int, ...]) -> Tensor:
    words, scales = parts[".weight_packed"], parts[".weight_scale"]
    scales = scales.view(len(scales), -1)
    num_outputs, num_inputs = (int(size) for size in parts[".weight_shape"])
    fitting = [each for each in bits if -(-num_inputs * each // _WORD) == words.shape[1]]
    if len(fitting) != 1:
        raise ValueError(f"{words.shape[1]} words for {num_inputs} numbers of {bits} bits")
    groups = parts.get(".weight_g_idx")
    if groups is None or bool((groups < 0).any()):
        groups = _consecutive_groups(num_inputs, scales.shape[1])
    numbers = unpack(words, fitting[0], num_inputs)
    # Signed numbers are stored above the smallest one, which is the zero point of all of them.
    zeros = torch.full_like(scales, 1 << fitting[0] - 1)
    if ".weight_zero_point" in parts:
        zeros = unpack(parts[".weight_zero_point"].T, fitting[0], num_outputs).T
    return _expand(numbers, scales, zeros, groups)
