"""Weights that are stored in groups of inputs with a scale each; see ``grouped.h``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftwise.checkpoints.quantization import QuantizedMatrix
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.panels import in_pairs
from draftwise.kernels.native.structures import GROUPED_HEADER, MAX_SECTIONS

# ``DecoderModel.bits`` of a model whose weights are stored in groups.
IN_GROUPS = 0
# Inputs of a group that the kernels support.
_GROUPS = (16, 32)
_BITS = (4, 5, 6, 8)
_CHUNK, _PARTS, _LOW_BITS = 128, 4, 4
_ALIGNMENT = 64


def is_groupable(matrix: QuantizedMatrix) -> bool:
    """Whether the kernels compute with a matrix that :func:`grouped_weight` packs."""
    return _regrouped(matrix) is not None and matrix.bits in _BITS


def grouped_weight(
    matrices: Sequence[QuantizedMatrix],
    library: NativeLibrary,
    interleave: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Pack matrices with the same inputs, whose outputs are concatenated.

    Args:
        matrices: the matrices.
        library: the compiled kernels.
        interleave: interleaves the rows of two tensors; ``None`` to concatenate the matrices. A
            single matrix has the outputs of both.

    Returns:
        ``[bytes]`` uint8.
    """
    width = 2 * library.lanes
    regrouped = [_regrouped(matrix) for matrix in matrices]
    known = [matrix for matrix in regrouped if matrix is not None]
    assert len(known) == len(matrices)
    if interleave is not None:
        first, second = _alike(known) if len(known) > 1 else _halves(known[0])
        sections = [
            replace(
                first,
                numbers=interleave(first.numbers, second.numbers),
                scales=interleave(first.scales, second.scales),
                minimums=_interleaved(first.minimums, second.minimums, interleave),
            )
        ]
    else:
        whole_panels = all(len(matrix.numbers) % width == 0 for matrix in known[:-1])
        if len(known) > MAX_SECTIONS or not whole_panels or _are_alike(known):
            sections = [_joined(_alike(known))]
        else:
            sections = known
    header = np.zeros(1, dtype=GROUPED_HEADER)
    header["num_sections"] = len(sections)
    offset = -(-header.nbytes // _ALIGNMENT) * _ALIGNMENT
    parts = [np.pad(header.view(np.uint8), (0, offset - header.nbytes))]
    panel = 0
    for to, matrix in zip(header["sections"][0], sections, strict=False):
        packed, is_wide = _packed_panels(matrix, width)
        to["first_panel"], to["offset"] = panel, offset
        if matrix.has_scale_per_output:
            to["output_scales"] = offset + len(packed)
            packed = np.concatenate([packed, _output_scales(matrix, width)])
        to["bits"], to["group"] = matrix.bits, _stored_group(matrix)
        to["has_minimums"], to["has_wide_scales"] = matrix.minimums is not None, is_wide
        to["values"] = _values(matrix)
        padded = np.pad(packed, (0, -len(packed) % _ALIGNMENT))
        parts.append(padded)
        panel += -(-len(matrix.numbers) // width)
        offset += len(padded)
    parts[0][: header.nbytes] = header.view(np.uint8)
    return torch.from_numpy(np.concatenate(parts))


def _regrouped(matrix: QuantizedMatrix) -> QuantizedMatrix | None:
    """The same matrix with groups of a size that the kernels support; ``None`` if it has none."""
    if matrix.has_scale_per_output:
        return matrix if matrix.group % _GROUPS[0] == 0 else None
    for group in reversed(_GROUPS):
        if matrix.group % group == 0 and matrix.numbers.shape[1] % group == 0:
            return _with_repeated_scales(matrix, matrix.group // group)
    return None


def _with_repeated_scales(matrix: QuantizedMatrix, repeats: int) -> QuantizedMatrix:
    """The same matrix with groups of fewer inputs."""
    if repeats == 1:
        return matrix
    scales, minimums = matrix.scales.repeat_interleave(repeats, dim=1), matrix.minimums
    if minimums is not None:
        minimums = minimums.repeat_interleave(repeats, dim=1)
    return replace(matrix, scales=scales, minimums=minimums)


def _are_alike(matrices: Sequence[QuantizedMatrix]) -> bool:
    kinds = {(m.bits, m.smallest, m.group, m.minimums is None) for m in matrices}
    return len(kinds) == 1


def _alike(matrices: Sequence[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """The same matrices in one format, without loss: the widest numbers and the smallest groups."""
    if _are_alike(matrices):
        return list(matrices)
    group = min(_stored_group(matrix) for matrix in matrices)
    has_minimums = any(matrix.minimums is not None for matrix in matrices)
    return [_widened(matrix, matrix.group // group, has_minimums) for matrix in matrices]


def _widened(matrix: QuantizedMatrix, repeats: int, has_minimums: bool) -> QuantizedMatrix:
    """The same matrix with 8 bits, and each scale stored several times."""
    even = _with_repeated_scales(matrix, repeats)
    if has_minimums and even.minimums is None:
        even = replace(even, minimums=torch.zeros_like(even.scales))
    return replace(even, bits=8, smallest=-128)


def _halves(matrix: QuantizedMatrix) -> list[QuantizedMatrix]:
    """The first and the second half of a matrix's outputs."""
    numbers, scales = matrix.numbers.chunk(2), matrix.scales.chunk(2)
    minimums = (None, None) if matrix.minimums is None else matrix.minimums.chunk(2)
    return [
        replace(matrix, numbers=own, scales=own_scales, minimums=own_minimums)
        for own, own_scales, own_minimums in zip(numbers, scales, minimums, strict=True)
    ]


def _joined(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    minimums = [each.minimums for each in matrices if each.minimums is not None]
    return replace(
        matrices[0],
        numbers=torch.cat([each.numbers for each in matrices]),
        scales=torch.cat([each.scales for each in matrices]),
        minimums=torch.cat(minimums) if minimums else None,
    )


def _interleaved(
    first: Tensor | None, second: Tensor | None, interleave: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    return None if first is None or second is None else interleave(first, second)


def _values(matrix: QuantizedMatrix) -> NDArray[np.uint16]:
    """``[64]`` the integer of each code, as the bits of bfloat16."""
    values = torch.zeros(64, dtype=torch.bfloat16)
    if matrix.bits < 8:
        count = 2**matrix.bits
        values[:count] = torch.arange(matrix.smallest, matrix.smallest + count)
    bits: NDArray[np.uint16] = values.view(torch.uint16).numpy()
    return bits


def _packed_panels(matrix: QuantizedMatrix, width: int) -> tuple[NDArray[np.uint8], bool]:
    """The panels of a section, and whether their scales are float32."""
    scales = [] if matrix.has_scale_per_output else [matrix.scales]
    if matrix.minimums is not None:
        scales.append(matrix.minimums)
    is_wide = any(not torch.equal(each.half().float(), each) for each in scales)
    stored = [_scale_bytes(each, width, is_wide) for each in scales]
    numbers = matrix.numbers
    if matrix.bits < 8:
        numbers = (numbers.short() - matrix.smallest).to(torch.int8)
    pairs = in_pairs(numbers, width)
    in_order = pairs.reshape(len(pairs), -1, _stored_group(matrix) * width).numpy()
    codes = in_order.view(np.uint8)
    if matrix.bits < 8:
        codes = _packed_codes(codes, matrix.bits)
    return np.concatenate([*stored, codes], axis=2).reshape(-1), is_wide


def _stored_group(matrix: QuantizedMatrix) -> int:
    """Inputs of a group in the layout of the kernels."""
    if not matrix.has_scale_per_output:
        return matrix.group
    return max(group for group in _GROUPS if matrix.group % group == 0)


def _output_scales(matrix: QuantizedMatrix, width: int) -> NDArray[np.uint8]:
    """The scales of all outputs, padded to whole panels."""
    scales = matrix.scales.flatten()
    in_bytes: NDArray[np.uint8] = F.pad(scales, (0, -len(scales) % width)).numpy().view(np.uint8)
    return in_bytes


def _scale_bytes(scales: Tensor, width: int, is_wide: bool) -> NDArray[np.uint8]:
    """``[panels, groups, bytes]`` the scales of each group of a panel."""
    padded = F.pad(scales, (0, 0, 0, -len(scales) % width))
    by_panel = padded.view(-1, width, padded.shape[1]).transpose(1, 2)
    stored = by_panel if is_wide else by_panel.half()
    in_bytes: NDArray[np.uint8] = stored.contiguous().numpy().view(np.uint8)
    return in_bytes


def _packed_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """``[panels, groups, bytes]`` codes of fewer than 8 bits, in chunks of 128."""
    chunks = codes.reshape(*codes.shape[:2], -1, _PARTS, _CHUNK // _PARTS)
    low = np.zeros((*chunks.shape[:3], _CHUNK // _PARTS), dtype=np.uint16)
    for part in range(_PARTS):
        low |= (chunks[..., part, :] & 15).astype(np.uint16) << (_LOW_BITS * part)
    parts = [low.view(np.uint8)]
    for bit in range(_LOW_BITS, bits):
        plane = np.packbits(chunks >> bit & 1, axis=-1, bitorder="little")
        parts.append(plane.reshape(*plane.shape[:3], -1))
    packed: NDArray[np.uint8] = np.concatenate(parts, axis=-1)
    return packed.reshape(*codes.shape[:2], -1)
