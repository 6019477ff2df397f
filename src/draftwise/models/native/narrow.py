"""Weights stored in fewer bits than they are multiplied in: see ``narrow.h``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftwise.models.native.library import NativeLibrary
from draftwise.models.native.panels import in_pairs
from draftwise.models.native.structures import NARROW_HEADER
from draftwise.models.quantization import QuantizedMatrix

# Of each number of a weight: quantised to whole numbers, or of bfloat16 without loss.
QUANTIZED_BITS, COMPRESSED_BITS = 8, 12
_ALIGNMENT = 64
_NUM_EXPONENTS, _NUM_CODES, _NO_CODE = 256, 16, 16
# Numbers of bfloat16 that are written as so many bytes.
_GROUP, _GROUP_BYTES = 128, 192
# Numbers of each matrix whose exponent has no code, at most: each is put in its place by itself.
_MOST_EXCEPTIONS = 1 / 1024
# Behind the last exception: it is in no weight.
_NEVER = np.array([-1], dtype=np.int64).view(np.uint64)

Counts = NDArray[np.int64]


def quantized_weight(weight: QuantizedMatrix, library: NativeLibrary) -> Tensor:
    """``[bytes]`` a weight of eight bits and its columns' scales."""
    width = 2 * library.lanes
    numbers = in_pairs(weight.numbers, width)
    scales = F.pad(weight.scales, (0, -len(weight.scales) % width))
    return _assembled(numbers, scales, _NEVER, np.zeros(_NUM_CODES, dtype=np.uint16))


def compressed_weight(pairs: Tensor, library: NativeLibrary) -> Tensor:
    """``[bytes]`` the same numbers in twelve bits each, none of them changed.

    Args:
        pairs: panels of bfloat16 in pairs, as many as 128 numbers or a multiple of it.
        library: the kernels.
    """
    counts = _exponent_counts(pairs, library)
    coded = np.sort(np.argsort(counts)[-_NUM_CODES:])
    codes = np.full(_NUM_EXPONENTS, _NO_CODE, dtype=np.uint8)
    codes[coded] = np.arange(_NUM_CODES)
    exceptions = np.concatenate(
        [np.zeros(counts.sum() - counts[coded].sum(), dtype=np.uint64), _NEVER]
    )
    numbers = torch.empty(pairs.numel() // _GROUP * _GROUP_BYTES, dtype=torch.uint8)
    library.compress(
        pairs.data_ptr(),
        pairs.numel(),
        codes.ctypes.data,
        numbers.data_ptr(),
        exceptions.ctypes.data,
    )
    mantissa_bits = 7
    return _assembled(numbers, None, exceptions, (coded << mantissa_bits).astype(np.uint16))


def are_compressible(weights: Iterable[Tensor], library: NativeLibrary) -> bool:
    """Whether hardly a number of any of these has an exponent that is rare among its like.

    Args:
        weights: of bfloat16.
        library: the kernels.
    """
    for weight in weights:
        counts = np.sort(_exponent_counts(weight.detach(), library))
        if counts[:-_NUM_CODES].sum() > _MOST_EXCEPTIONS * counts.sum():
            return False
    return True


def _exponent_counts(numbers: Tensor, library: NativeLibrary) -> Counts:
    """``[256]`` how many numbers have each exponent."""
    counts = np.zeros(_NUM_EXPONENTS, dtype=np.int64)
    numbers = numbers.contiguous()
    library.count_exponents(numbers.data_ptr(), numbers.numel(), counts.ctypes.data)
    return counts


def _assembled(
    numbers: Tensor,
    scales: Tensor | None,
    exceptions: NDArray[np.uint64],
    exponents: NDArray[np.uint16],
) -> Tensor:
    """``[bytes]`` one part behind the other, the header first."""
    header = np.zeros(1, dtype=NARROW_HEADER)
    parts = {
        "header": header.view(np.uint8),
        "exceptions": exceptions.view(np.uint8),
        "scales": np.zeros(0, dtype=np.uint8) if scales is None else scales.numpy().view(np.uint8),
        "panels": numbers.flatten().view(torch.uint8).numpy(),
    }
    places, size = {}, 0
    for name, part in parts.items():
        places[name] = size
        size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    header["panels"], header["exceptions"] = places["panels"], places["exceptions"]
    header["scales"] = 0 if scales is None else places["scales"]
    header["num_exceptions"] = len(exceptions) - len(_NEVER)
    header["exponents"] = np.tile(exponents, 2)
    whole = np.zeros(size, dtype=np.uint8)
    for name, part in parts.items():
        whole[places[name] : places[name] + part.nbytes] = part
    return torch.from_numpy(whole)
