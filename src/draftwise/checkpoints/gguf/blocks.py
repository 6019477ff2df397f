"""The blocks of GGUF files as integers with scales, which the native kernels compute with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftwise.checkpoints.quantization import QuantizedMatrix

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def matrix_of_blocks(kind: str, rows: Bytes) -> QuantizedMatrix | None:
    """The integers and scales of a tensor's blocks.

    Args:
        kind: name of the block type.
        rows: ``[rows, bytes]`` the blocks of each row.

    Returns:
        ``None`` for types without integers, and for unknown ones.
    """
    known = _BLOCKS.get(kind)
    if known is None or rows.ndim != 2:
        return None
    num_bytes, read = known
    blocks = np.ascontiguousarray(rows).reshape(-1, num_bytes)
    numbers, scales, minimums, bits, smallest = read(blocks)
    count = len(rows)
    return QuantizedMatrix(
        torch.from_numpy(numbers.astype(np.int8).reshape(count, -1)),
        torch.from_numpy(scales.astype(np.float32).reshape(count, -1)),
        None
        if minimums is None
        else torch.from_numpy(minimums.astype(np.float32).reshape(count, -1)),
        bits,
        smallest,
    )


# What a block contains: numbers, scales, minimums, bits of a number, and the smallest number.
_Contents = tuple[NDArray[Any], Floats, Floats | None, int, int]


def _half(blocks: Bytes, at: int) -> Floats:
    """``[blocks, 1]`` the float16 number at a byte of each block."""
    number: Floats = (
        np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)
    )
    return number


def _nibbles(packed: Bytes) -> Bytes:
    """``[..., 2, n]`` low and high halves of bytes ``[..., n]``."""
    return np.stack([packed & 15, packed >> 4], axis=-2)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """``[blocks, 32]`` the fifth bit of each number."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")


def _q4_0(blocks: Bytes) -> _Contents:
    codes = _nibbles(blocks[:, 2:]).reshape(len(blocks), 32)
    return codes.astype(np.int8) - 8, _half(blocks, 0), None, 4, -8


def _q4_1(blocks: Bytes) -> _Contents:
    codes = _nibbles(blocks[:, 4:]).reshape(len(blocks), 32)
    return codes, _half(blocks, 0), -_half(blocks, 2), 4, 0


def _q5_0(blocks: Bytes) -> _Contents:
    low = _nibbles(blocks[:, 6:]).reshape(len(blocks), 32)
    codes = low | _fifth_bits(blocks, 2) << 4
    return codes.astype(np.int8) - 16, _half(blocks, 0), None, 5, -16


def _q5_1(blocks: Bytes) -> _Contents:
    low = _nibbles(blocks[:, 8:]).reshape(len(blocks), 32)
    codes = low | _fifth_bits(blocks, 4) << 4
    return codes, _half(blocks, 0), -_half(blocks, 2), 5, 0


def _q8_0(blocks: Bytes) -> _Contents:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None, 8, -128


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """``[blocks, 8]`` each: the scales and minimums of Q4_K and Q5_K."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minimums


def _q4_k(blocks: Bytes) -> _Contents:
    scales, minimums = _scales_and_minimums(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(len(blocks), 256)
    return codes, scales, minimums, 4, 0


def _q5_k(blocks: Bytes) -> _Contents:
    scales, minimums = _scales_and_minimums(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = blocks[:, None, 16:48] >> shifts & 1
    return (low | high << 4).reshape(len(blocks), 256), scales, minimums, 5, 0


def _q6_k(blocks: Bytes) -> _Contents:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = (2 * np.arange(4, dtype=np.uint8))[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).reshape(len(blocks), 256)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return codes.astype(np.int8) - 32, scales, None, 6, -32


_BLOCKS: Mapping[str, tuple[int, Callable[[Bytes], _Contents]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
