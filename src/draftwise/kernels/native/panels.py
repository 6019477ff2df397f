"""Packing of weights into panels of two vectors of columns, for the kernels of ``matrix.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.kernels.native.library import NativeLibrary


def panels(weight: Tensor, library: NativeLibrary) -> Tensor:
    """Pack a weight ``[out_features, in_features]``, whose outputs are the columns of the panels.

    The columns are padded with zeros to whole panels.
    """
    lanes = library.lanes
    width = 2 * lanes
    columns, depth = weight.shape
    if weight.dtype == torch.bfloat16 and library.multiplies_pairs:
        return in_pairs(weight, width)
    weight = F.pad(weight, (0, 0, 0, -columns % width))
    count = len(weight) // width
    if weight.dtype == torch.bfloat16:  # a word contains numbers of two columns, LANES apart
        return weight.view(count, 2, lanes, depth).permute(0, 3, 2, 1).contiguous()
    return weight.view(count, width, depth).transpose(1, 2).contiguous()


def padded_to_panels(numbers: Tensor, library: NativeLibrary) -> Tensor:
    """``[..., columns]`` with zeros up to whole panels."""
    return F.pad(numbers, (0, -numbers.shape[-1] % (2 * library.lanes)))


def interleaved(gate: Tensor, up: Tensor, library: NativeLibrary) -> Tensor:
    """Merge two weights ``[out_features, …]``. Each panel of the result has a vector of each."""
    lanes = library.lanes
    both = [F.pad(each, (*(0, 0) * (each.dim() - 1), 0, -len(each) % lanes)) for each in (gate, up)]
    joined = torch.stack([each.reshape(-1, lanes, *each.shape[1:]) for each in both], dim=1)
    return joined.flatten(0, 2)


def in_pairs(weight: Tensor, width: int) -> Tensor:
    """``[panels, pairs, width, 2]`` panels of a weight; a pair is two numbers of a column."""
    columns, depth = weight.shape
    weight = F.pad(weight, (0, depth % 2, 0, -columns % width))
    count, depth = len(weight) // width, weight.shape[1]
    return weight.view(count, width, depth // 2, 2).transpose(1, 2).contiguous()
