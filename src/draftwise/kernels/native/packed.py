"""Weights that are multiplied as integers; see ``packed.h`` and ``blocks.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwise.checkpoints.gguf.grids import grid_of
from draftwise.checkpoints.quantization import (
    BlockRows,
    StoredRows,
    in_pieces,
    stored_rows,
)
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.structures import (
    BLOCK_KIND,
    MAX_PACKED_SECTIONS,
    PACKED_HEADER,
    PACKED_KIND,
    ExpandCall,
    PackCall,
    PackIntegersCall,
)
from draftwise.models.memory import (
    ScratchMemory,
    release_file_pages,
    zeros_in_large_pages,
)

# ``DecoderModel.bits`` of a model whose weights are packed.
PACKED = 0
TILE_COLUMNS, UNIT_COLUMNS, GROUP_INPUTS = 16, 32, 32
_ALIGNMENT = 64
_BITS = (2, 3, 4, 5, 6, 8)
# ``ScaleForm`` of ``packed.h``.
_BYTES, _HALVES, _FLOATS, _POWERS = range(4)
# Codes of IQ4_NL and IQ4_XS, less 128, and those of MXFP4 and NVFP4, doubled and less 12.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FLOATS_OF_4_BITS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

Kind = NDArray[np.void]


def _signed(*numbers: int) -> tuple[int, ...]:
    """Codes of up to eight numbers, whose sign is the highest of 4 bits."""
    rest = (0,) * (8 - len(numbers))
    return (*numbers, *rest, *(-number for number in numbers), *rest)


@dataclass(frozen=True)
class _Format:
    """How the numbers of a block type are packed; see ``PackedKind``."""

    bits: int
    zero: int
    form: int = _HALVES
    has_minimums: bool = False
    has_halves: bool = False
    table: tuple[int, ...] = ()
    unit: float = 1.0
    has_grid: bool = False


# Numbers of the grids, whose scales are s + 1/2 in units of 1/4 or 1/2, or 2 s + 1. Those of one
# bit are the ternary numbers and 1/8 or -1/8 more.
_GRID = _Format(4, 128, _BYTES, has_grid=True)
_GRID_2 = replace(_GRID, table=_signed(8, 25, 43), unit=1 / 8)
_GRID_3 = replace(_GRID, table=_signed(4, 12, 20, 28, 36, 44, 52, 62), unit=1 / 4)
_GRID_1 = replace(_GRID, table=(-7, 1, 9, *(0,) * 5, -9, -1, 7, *(0,) * 5), unit=1 / 8)

_FORMATS: Mapping[str, _Format] = {
    "Q4_0": _Format(4, 8),
    "Q4_1": _Format(4, 0, has_minimums=True),
    "Q5_0": _Format(5, 16),
    "Q5_1": _Format(5, 0, has_minimums=True),
    "Q8_0": _Format(8, 128),
    "Q2_K": _Format(2, 0, _BYTES, has_minimums=True, has_halves=True),
    "Q3_K": _Format(3, 4, _BYTES, has_halves=True),
    "Q4_K": _Format(4, 0, _BYTES, has_minimums=True),
    "Q5_K": _Format(5, 0, _BYTES, has_minimums=True),
    "Q6_K": _Format(6, 32, _BYTES, has_halves=True),
    "IQ4_NL": _Format(4, 128, table=_LEVELS),
    "IQ4_XS": _Format(4, 128, _BYTES, table=_LEVELS),
    "IQ1_S": _GRID_1,
    "IQ1_M": replace(_GRID_1, has_halves=True),
    "IQ2_XXS": _GRID_2,
    "IQ2_XS": replace(_GRID_2, has_halves=True),
    "IQ2_S": replace(_GRID_2, has_halves=True),
    "IQ3_XXS": _GRID_3,
    "IQ3_S": replace(_GRID, table=_signed(1, 3, 5, 7, 9, 11, 13, 15)),
    "TQ1_0": _Format(2, 1, _BYTES),
    "TQ2_0": _Format(2, 1, _BYTES),
    "MXFP4": _Format(4, 12, _POWERS, table=_FLOATS_OF_4_BITS),
    "NVFP4": _Format(4, 12, has_halves=True, table=_FLOATS_OF_4_BITS),
}
# Groups of a block of the packed format: the most that divide the inputs, or the pieces whose order
# is changed. With factors of its own, a block has up to 256 inputs, as block types with factors.
_BLOCKS = (4, 2, 1)
_BLOCKS_WITH_FACTORS = (8, *_BLOCKS)


def is_packable(stored: StoredRows) -> bool:
    """Whether the kernels can multiply with stored rows."""
    return _kind_of(stored) is not None


def packed_weight(
    layers: Sequence[Sequence[StoredRows]], library: NativeLibrary, paired: bool = False
) -> Tensor:
    """Pack the rows of layers with the same inputs.

    The pages of a mapped file that have been read are given back to the system.

    Args:
        layers: the rows of each layer, in parts that follow each other.
        library: the compiled kernels.
        paired: whether the first half of the outputs is a gate, and the second half belongs to it.

    Returns:
        ``[bytes]`` uint8.

    Raises:
        ValueError: the parts cannot be packed; :func:`why_not_packed` tells in advance.
    """
    parts = _merged([part for layer in layers for part in layer])
    reason = _why_not(parts, paired)
    if reason is not None:
        raise ValueError(reason)
    if paired:
        return _packed([_halves(parts)], library, True)
    return _packed([[part] for part in parts], library, False)


def why_not_packed(layers: Sequence[Sequence[StoredRows]], paired: bool = False) -> str | None:
    """Why :func:`packed_weight` cannot pack layers, as a clause; ``None`` if it can."""
    return _why_not(_merged([part for layer in layers for part in layer]), paired)


def rows_of(
    layers: Sequence[nn.Linear], order: Tensor | None = None
) -> Sequence[Sequence[StoredRows]]:
    """The stored rows of layers with the same inputs, in parts that follow each other.

    Args:
        layers: the layers.
        order: ``[rows]`` int64, which of all their rows is where; ``None`` for their own order.
    """
    rows = [stored_rows(layer) for layer in layers]
    return rows if order is None else [_reordered(rows, order)]


def _reordered(layers: Sequence[Sequence[StoredRows]], order: Tensor) -> list[StoredRows]:
    """Rows of layers in another order. Neighbours are one part if they are of the same tensor."""
    stored: dict[int, StoredRows] = {}
    owners, places = [], []
    for part in (part for layer in layers for part in layer):
        key, whole, rows = id(part), part, torch.arange(len(part))
        if isinstance(part, BlockRows):
            key, whole = id(part.data), replace(part, order=None)
            rows = rows if part.order is None else part.order
        stored.setdefault(key, whole)
        owners.append(torch.full((len(rows),), list(stored).index(key)))
        places.append(rows)
    owner, place = torch.cat(owners)[order], torch.cat(places)[order]
    runs, lengths = torch.unique_consecutive(owner, return_counts=True)
    parts = list(stored.values())
    pieces = zip(runs.tolist(), torch.split(place, lengths.tolist()), strict=True)
    return [parts[number].taken(rows) for number, rows in pieces]


def _why_not(parts: Sequence[StoredRows], paired: bool) -> str | None:
    for part in parts:
        if _kind_of(part) is None:
            return f"its weights are stored as {part.description}, which the native kernels lack"
    if paired:
        whole = len(parts) == 2 and len(parts[0]) == len(parts[1])
        if not whole and (len(parts) != 1 or len(parts[0]) % 2):
            return "its gate and up projections are stored in several parts"
        return None
    if len(parts) > MAX_PACKED_SECTIONS or any(len(part) % UNIT_COLUMNS for part in parts[:-1]):
        return "the queries, keys and values of its layers are stored in different types"
    return None


def _merged(parts: Sequence[StoredRows]) -> list[StoredRows]:
    """The same rows, with neighbours of one type together where they do not end with a unit."""
    merged: list[StoredRows] = []
    for part in parts:
        before = merged[-1] if merged else None
        if before is not None and len(before) % UNIT_COLUMNS and before.is_like(part):
            merged[-1] = before.followed_by(part)
        else:
            merged.append(part)
    return merged


def _halves(parts: Sequence[StoredRows]) -> list[StoredRows]:
    if len(parts) == 2:
        return list(parts)
    half = len(parts[0]) // 2
    return [parts[0].rows(0, half), parts[0].rows(half, 2 * half)]


def _packed(
    sections: Sequence[Sequence[StoredRows]], library: NativeLibrary, paired: bool
) -> Tensor:
    """Pack sections, each of which has one part, or the two that are paired."""
    header = np.zeros(1, PACKED_HEADER)
    header["is_paired"], header["num_sections"] = paired, len(sections)
    offset, unit = _aligned(header.nbytes), 0
    layouts = []
    for to, section in zip(header["sections"][0], sections, strict=False):
        kinds = [_known_kind(part) for part in (section[0], section[-1])]
        sizes = [library.tile_bytes(kind.ctypes.data, section[0].num_inputs) for kind in kinds]
        count = len(section[0]) if paired else -(-len(section[0]) // 2)
        units = -(-count // TILE_COLUMNS)
        to["first_unit"], to["offset"], to["kinds"] = unit, offset, np.concatenate(kinds)
        layouts.append((offset, sizes))
        offset += units * sum(sizes)
        unit += units
    packed = zeros_in_large_pages(offset)
    packed[: header.nbytes] = torch.from_numpy(header.view(np.uint8))
    for section, (start, sizes) in zip(sections, layouts, strict=True):
        for number, part in enumerate(section):
            stride = sum(sizes) if paired else sizes[0]
            _pack(part, packed[start + number * sizes[0] :], stride, library)
    return packed


def _pack(part: StoredRows, to: Tensor, stride: int, library: NativeLibrary) -> None:
    """Write the tiles of a part."""
    threads = library.threads()
    if isinstance(part, BlockRows):
        kind = _block_kind(part)
        order = None if part.order is None else part.order.contiguous()
        blocks = _block_order(part, kind)
        data = np.ascontiguousarray(part.data)
        call = PackCall(
            data.ctypes.data,
            None if order is None else order.data_ptr(),
            None if blocks is None else blocks.data_ptr(),
            kind.ctypes.data,
            to.data_ptr(),
            data.shape[1],
            len(part),
            part.num_inputs,
            stride,
        )
        library.pack_blocks(ctypes.byref(call), ctypes.byref(threads))
        release_file_pages(part.data)
        return
    kind = _known_kind(part)
    numbers, scales = part.numbers.contiguous(), part.scales.contiguous()
    minimums = None if part.minimums is None else part.minimums.contiguous()
    integers = PackIntegersCall(
        numbers.data_ptr(),
        scales.data_ptr(),
        None if minimums is None else minimums.data_ptr(),
        kind.ctypes.data,
        to.data_ptr(),
        len(part),
        part.num_inputs,
        part.group,
        stride,
        part.smallest,
    )
    library.pack_integers(ctypes.byref(integers), ctypes.byref(threads))


def _block_order(part: BlockRows, kind: Kind) -> Tensor | None:
    """``[blocks]`` int64, which part of a row each packed block is; ``None`` if they are in order.

    A piece of a row may be smaller than a block of the file, which then fills several packed ones.
    """
    if part.pieces is None:
        return None
    num_blocks = part.num_inputs // (GROUP_INPUTS * int(kind["packed"]["groups"][0]))
    return torch.arange(num_blocks).view(len(part.pieces), -1)[part.pieces].flatten()


def expand_blocks(blocks: BlockRows, library: NativeLibrary) -> Tensor:
    """The numbers of rows in float32, ``[rows, inputs]``.

    Raises:
        ValueError: the kernels do not have the type.
    """
    kind, threads = _block_kind(blocks), library.threads()
    data = np.ascontiguousarray(blocks.chosen)
    numbers = torch.empty(len(blocks), blocks.num_inputs)
    call = ExpandCall(
        data.ctypes.data,
        kind.ctypes.data,
        numbers.data_ptr(),
        data.shape[1],
        len(blocks),
        blocks.num_inputs,
    )
    library.expand_rows(ctypes.byref(call), ctypes.byref(threads))
    if blocks.pieces is not None:
        numbers = in_pieces(numbers, blocks.pieces)
    return numbers


def expanded_rows(stored: Sequence[StoredRows], library: NativeLibrary) -> Tensor:
    """The numbers of rows in float32, ``[rows, inputs]``.

    Args:
        stored: the rows, in parts that follow each other.
        library: the compiled kernels.

    Raises:
        ValueError: the kernels do not have the type of a part.
    """
    return torch.cat(
        [
            expand_blocks(part, library) if isinstance(part, BlockRows) else part.dequantize()
            for part in stored
        ]
    )


def embedding_blocks(stored: Sequence[StoredRows]) -> tuple[BlockRows, Kind] | None:
    """The rows of an embedding and how they are read; ``None`` if the kernels cannot read them."""
    match stored:
        case (BlockRows(order=None, pieces=None) as blocks,) if _kind_of(blocks) is not None:
            return blocks, _block_kind(blocks)
    return None


def multiply_packed(
    rows: Tensor,
    packed: Tensor,
    columns: int,
    library: NativeLibrary,
    scratch: ScratchMemory | None = None,
) -> Tensor:
    """Multiply rows with a packed weight that is not paired.

    Args:
        rows: ``[rows, inputs]`` float32.
        packed: see :func:`packed_weight`.
        columns: number of outputs.
        library: the compiled kernels.
        scratch: memory for intermediate results; ``None`` to allocate it.

    Returns:
        ``[rows, columns]`` float32.
    """
    count, inputs = rows.shape
    rows, threads = rows.contiguous(), library.threads()
    result = torch.empty(count, columns)
    memory = scratch or ScratchMemory()
    library.multiply_packed(
        rows.data_ptr(),
        count,
        inputs,
        packed.data_ptr(),
        columns,
        result.data_ptr(),
        memory.address(library.packed_memory(count, inputs, threads.count)),
        ctypes.byref(threads),
    )
    return result


def _known_kind(stored: StoredRows) -> Kind:
    kind = _kind_of(stored)
    if kind is None:
        raise ValueError(f"cannot pack {stored.description}")
    return kind


def _block_kind(blocks: BlockRows) -> Kind:
    """``[1]`` of ``BlockKind``. The grid that it refers to is never freed."""
    kind = np.zeros(1, BLOCK_KIND)
    kind["packed"], kind["type"] = _known_kind(blocks), blocks.type_number
    if _FORMATS[blocks.type_name].has_grid:
        grid = grid_of(blocks.type_name)
        assert grid is not None
        kind["grid"] = grid.ctypes.data
    return kind


def _kind_of(stored: StoredRows) -> Kind | None:
    """``[1]`` of ``PackedKind``; ``None`` if the kernels do not have it."""
    size = stored.num_inputs
    if isinstance(stored, BlockRows) and stored.pieces is not None:
        size //= len(stored.pieces)
    if size % GROUP_INPUTS:
        return None
    if isinstance(stored, BlockRows):
        known = _FORMATS.get(stored.type_name)
        if known is None or (known.has_grid and grid_of(stored.type_name) is None):
            return None
        return _kind(replace(known, unit=known.unit * stored.unit), size)
    group = stored.group
    if stored.bits not in _BITS or group % 16 or (group > 16 and group % GROUP_INPUTS):
        return None
    scales = [stored.scales, *([] if stored.minimums is None else [stored.minimums])]
    is_half = all(torch.equal(each.half().float(), each) for each in scales)
    return _kind(
        _Format(
            stored.bits,
            -stored.smallest,
            _HALVES if is_half else _FLOATS,
            stored.minimums is not None,
            group == 16,
        ),
        size,
    )


def _kind(known: _Format, size: int) -> Kind:
    """``[1]`` of ``PackedKind`` whose blocks divide a size."""
    groups = size // GROUP_INPUTS
    kind = np.zeros(1, PACKED_KIND)
    kind["bits"], kind["zero"], kind["form"] = known.bits, known.zero, known.form
    kind["has_minimums"], kind["has_halves"] = known.has_minimums, known.has_halves
    kind["unit"] = np.float32(known.unit)
    counts = _BLOCKS_WITH_FACTORS if known.form == _BYTES else _BLOCKS
    kind["groups"] = next(each for each in counts if groups % each == 0)
    if known.table:
        kind["has_table"] = 1
        kind["table"] = np.array(known.table) + known.zero
    return kind


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
