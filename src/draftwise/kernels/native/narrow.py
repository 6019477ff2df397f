"""Weights that are stored in fewer bits; see ``narrow.h``."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftwise.checkpoints.quantization import QuantizedMatrix
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.panels import in_pairs
from draftwise.kernels.native.structures import NARROW_HEADER

# Stored bits per number: quantised integers, and losslessly compressed bfloat16.
QUANTIZED_BITS, COMPRESSED_BITS = 8, 12
_ALIGNMENT = 64
_NUM_EXPONENTS, _NUM_CODES, _NO_CODE = 256, 16, 16
# Numbers of a compressed group, and its bytes.
_GROUP, _GROUP_BYTES = 128, 192
# Maximum fraction of the numbers of a compressed matrix whose exponent has no code. The kernels
# insert these numbers one by one.
_MAX_EXCEPTIONS = 1 / 1024
# Marks the end of the exceptions, with an index larger than that of any number.
_END_MARKER = np.array([-1], dtype=np.int64).view(np.uint64)

Counts = NDArray[np.int64]


def quantized_weight(weight: QuantizedMatrix, library: NativeLibrary) -> Tensor:
    """Pack an 8-bit weight and the scales of its outputs.

    Args:
        weight: the quantised weight.
        library: the compiled kernels.

    Returns:
        ``[bytes]`` uint8.
    """
    width = 2 * library.lanes
    numbers = in_pairs(weight.numbers, width)
    scales = F.pad(weight.scales.flatten(), (0, -len(weight.scales) % width))
    return _assembled(numbers, scales, _END_MARKER, np.zeros(_NUM_CODES, dtype=np.uint16))


def compressed_weight(pairs: Tensor, library: NativeLibrary) -> Tensor:
    """Compress a packed weight to 12 bits per number without loss.

    Args:
        pairs: packed panels of bfloat16 in pairs. The number of elements is a multiple of 128.
        library: the compiled kernels.

    Returns:
        ``[bytes]`` uint8.
    """
    counts = _exponent_counts(pairs, library)
    coded = np.sort(np.argsort(counts)[-_NUM_CODES:])
    codes = np.full(_NUM_EXPONENTS, _NO_CODE, dtype=np.uint8)
    codes[coded] = np.arange(_NUM_CODES)
    exceptions = np.concatenate(
        [np.zeros(counts.sum() - counts[coded].sum(), dtype=np.uint64), _END_MARKER]
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
    """Whether each weight has few enough numbers outside its 16 most frequent exponents.

    Args:
        weights: weights of bfloat16.
        library: the compiled kernels.
    """
    for weight in weights:
        counts = np.sort(_exponent_counts(weight.detach(), library))
        if counts[:-_NUM_CODES].sum() > _MAX_EXCEPTIONS * counts.sum():
            return False
    return True


def _exponent_counts(numbers: Tensor, library: NativeLibrary) -> Counts:
    """``[256]`` number of occurrences of each exponent."""
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
    """``[bytes]`` uint8, the aligned parts of a stored weight, starting with the header."""
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
    header["num_exceptions"] = len(exceptions) - len(_END_MARKER)
    header["exponents"] = np.tile(exponents, 2)
    whole = np.zeros(size, dtype=np.uint8)
    for name, part in parts.items():
        whole[places[name] : places[name] + part.nbytes] = part
    return torch.from_numpy(whole)
