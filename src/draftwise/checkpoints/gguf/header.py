"""The header of a GGUF file: its metadata, and where its tensors are.

The format is described in ``docs/gguf.md`` of the ``ggml`` repository. The file is mapped. Arrays
are decoded when they are asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAGIC: Final = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_STRING, _ARRAY, _BOOLEAN = 8, 9, 7
_SCALARS: Mapping[int, np.dtype[Any]] = {
    kind: np.dtype(name)
    for kind, name in enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))
} | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}


@dataclass(frozen=True)
class BlockType:
    """How the numbers of a tensor are stored.

    Attributes:
        number: number of the type in ggml, and in files.
        name: its name.
        numbers: numbers of a block.
        num_bytes: bytes of a block.
    """

    number: int
    name: str
    numbers: int
    num_bytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    number: BlockType(number, *each)
    for number, each in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
    }.items()
}


class DamagedFileError(ValueError):
    """A file that is not a complete GGUF file; the message is a clause about it."""


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file.

    Attributes:
        name: its name.
        kind: how its numbers are stored.
        shape: ``[..., rows, columns]``.
        data: ``[rows, bytes]`` uint8, a view of the mapped file; the rows of all dimensions but the
            last one.
    """

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class GgufHeader:
    """The metadata and tensors of one mapped file.

    Attributes:
        keys: names of the metadata, in the file's order.
        tensors: the tensors, in the file's order.
    """

    def __init__(self, path: Path) -> None:
        """Map a file and read its header.

        Raises:
            OSError: the file cannot be read.
            DamagedFileError: it is not a complete GGUF file.
        """
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < len(MAGIC):
                raise DamagedFileError("is not a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._map[: len(MAGIC)] != MAGIC:
            raise DamagedFileError("is not a GGUF file")
        self._places: dict[str, _Place] = {}
        try:
            self._read()
        except (struct.error, OverflowError) as error:
            raise DamagedFileError("is truncated: its header has no end") from error

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the metadata, in the file's order."""
        return tuple(self._places)

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: a number, a string, a boolean, or a list of those.

        Args:
            key: its whole name.
            default: returned if the file has no such key.

        Raises:
            DamagedFileError: a string is not UTF-8.
        """
        place = self._places.get(key)
        if place is None:
            return default
        try:
            return place.value(self._map)
        except UnicodeDecodeError as error:
            raise DamagedFileError(f"is damaged: {key!r} is not UTF-8") from error

    def _read(self) -> None:
        (version,) = struct.unpack_from("<I", self._map, len(MAGIC))
        if version & 0xFFFF == 0:
            raise DamagedFileError("is in big-endian order; convert it to little-endian")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise DamagedFileError(f"has version {version} of the format; {known} are read")
        num_tensors, num_keys = struct.unpack_from("<QQ", self._map, 8)
        at = 24
        for _ in range(num_keys):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._map, at)
            if key in self._places:
                raise DamagedFileError(f"is damaged: it has the key {key!r} twice")
            self._places[key], at = self._place(key, kind, at + 4)
        descriptions = []
        for _ in range(num_tensors):
            description, at = self._description(at)
            descriptions.append(description)
        alignment = self.value("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise DamagedFileError(
                f"has 'general.alignment' = {alignment!r}: it must be a power of two"
            )
        start = -(-at // alignment) * alignment
        self.tensors = tuple(self._tensor(each, start, alignment) for each in descriptions)
        names = [each.name for each in self.tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DamagedFileError(f"is damaged: it has the tensor {twice!r} twice")

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._map, at)
        end = self._checked_end(at + 8, length)
        try:
            return self._map[at + 8 : end].decode(), end
        except UnicodeDecodeError as error:
            raise DamagedFileError("is damaged: a name is not UTF-8") from error

    def _place(self, key: str, kind: int, at: int) -> tuple[_Place, int]:
        """Where a value is, and where it ends."""
        if kind == _STRING:
            return _Strings(at, 1, True), self._after_strings(at, 1)
        if kind == _ARRAY:
            kind, count = struct.unpack_from("<IQ", self._map, at)
            at += 12
            if kind == _STRING:
                return _Strings(at, count, False), self._after_strings(at, count)
            return self._numbers(key, kind, at, count, False)
        return self._numbers(key, kind, at, 1, True)

    def _numbers(
        self, key: str, kind: int, at: int, count: int, is_single: bool
    ) -> tuple[_Place, int]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise DamagedFileError(f"is damaged: {key!r} has a value of unknown type {kind}")
        return _Numbers(at, count, is_single, dtype), self._checked_end(at, count * dtype.itemsize)

    def _after_strings(self, at: int, count: int) -> int:
        """Where strings that begin at a byte end."""
        unpack, mapped = struct.Struct("<Q").unpack_from, self._map
        # Each string has 8 bytes at least.
        self._checked_end(at, 8 * count)
        for _ in range(count):
            at += 8 + unpack(mapped, at)[0]
        return self._checked_end(at, 0)

    def _checked_end(self, at: int, length: int) -> int:
        if at + length > len(self._map):
            raise DamagedFileError("is truncated: its header has no end")
        return at + length

    def _description(self, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        """Name, shape, type and offset of a tensor."""
        name, at = self._string(at)
        (dimensions,) = struct.unpack_from("<I", self._map, at)
        if dimensions > _MOST_DIMENSIONS:
            raise DamagedFileError(f"is damaged: the tensor {name!r} has {dimensions} dimensions")
        shape = struct.unpack_from(f"<{dimensions}Q", self._map, at + 4)
        at += 4 + 8 * dimensions
        kind, offset = struct.unpack_from("<IQ", self._map, at)
        return (name, shape[::-1], kind, offset), at + 12

    def _tensor(
        self, description: tuple[str, tuple[int, ...], int, int], start: int, alignment: int
    ) -> TensorPlace:
        name, shape, number, offset = description
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            raise DamagedFileError(
                f"has the tensor {name!r} in blocks of type {number}, which are not known"
            )
        columns = shape[-1] if shape else 1
        rows = prod(shape[:-1])
        if columns % kind.numbers:
            raise DamagedFileError(
                f"is damaged: the tensor {name!r} has rows of {columns} numbers, and blocks of "
                f"{kind.name} have {kind.numbers}"
            )
        if offset % alignment:
            raise DamagedFileError(f"is damaged: the tensor {name!r} is not aligned")
        row_bytes = columns // kind.numbers * kind.num_bytes
        if start + offset + rows * row_bytes > len(self._map):
            raise DamagedFileError(f"is truncated: the tensor {name!r} is incomplete")
        data = np.frombuffer(self._map, np.uint8, rows * row_bytes, start + offset)
        return TensorPlace(name, kind, shape, data.reshape(rows, row_bytes))


@dataclass(frozen=True)
class _Place:
    """Where a value of the metadata is.

    Attributes:
        at: its first byte; of an array, that of the first element.
        count: elements.
        is_single: whether it is no array.
    """

    at: int
    count: int
    is_single: bool

    def value(self, mapped: mmap.mmap) -> Any:
        """Decode it."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Strings(_Place):
    """Strings, each with its length in 8 bytes before it."""

    def value(self, mapped: mmap.mmap) -> Any:
        unpack, at = struct.Struct("<Q").unpack_from, self.at
        found = []
        for _ in range(self.count):
            end = at + 8 + unpack(mapped, at)[0]
            found.append(mapped[at + 8 : end].decode())
            at = end
        return found[0] if self.is_single else found


@dataclass(frozen=True)
class _Numbers(_Place):
    """Numbers or booleans of one type."""

    dtype: np.dtype[Any]

    def value(self, mapped: mmap.mmap) -> Any:
        found: list[Any] = np.frombuffer(mapped, self.dtype, self.count, self.at).tolist()
        return found[0] if self.is_single else found
