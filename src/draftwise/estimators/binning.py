"""Two-dimensional bins of the signals S and A, each in [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.estimators.records import Floats

# Maximum number of cells of an adaptive grid, mean number of records per cell, and the minimum
# number of records for adaptive bins.
_MAX_CELLS = 400
_RECORDS_PER_CELL = 20
_MIN_ADAPTIVE_RECORDS = 500
# Separates exact zeros, which top-k and top-p produce often, from small positive values.
_SMALLEST_POSITIVE = 1e-30


@dataclass(frozen=True)
class Grid:
    """Rows along S, and separate bins along A for each row.

    A value on an edge belongs to the bin above it.

    Attributes:
        overlap_edges: ``[rows - 1]`` float32 ascending, the edges between the rows.
        agreement_edges: ``[rows, columns - 1]`` float32 ascending, the edges between the bins of
            each row. Rows with fewer bins than the longest are padded with infinity.
    """

    overlap_edges: Tensor
    agreement_edges: Tensor

    def __post_init__(self) -> None:
        shape = self.agreement_edges.shape
        if len(shape) != 2 or self.overlap_edges.shape != (shape[0] - 1,):
            raise ValueError("every row along S needs edges along A")
        for edges in (self.overlap_edges, self.agreement_edges):
            finite = edges.isfinite()
            rising = (edges[..., 1:] > edges[..., :-1]) | ~finite[..., 1:]
            if not bool((rising & (finite[..., :-1] | ~finite[..., 1:])).all()):
                raise ValueError("edges must be ascending")
            if not bool(((edges > 0) & (edges <= 1) | (edges == math.inf)).all()):
                raise ValueError("edges must lie in (0, 1]")

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of columns in the longest row."""
        rows, inner_edges = self.agreement_edges.shape
        return rows, inner_edges + 1

    @cached_property
    def num_columns(self) -> list[int]:
        """Number of bins in each row."""
        counts: list[int] = (self.agreement_edges.isfinite().sum(dim=1) + 1).tolist()
        return counts

    @property
    def num_cells(self) -> int:
        """Total number of cells."""
        return sum(self.num_columns)

    def rows_of(self, overlap: Tensor) -> Tensor:
        """Row index of each S; any shape."""
        return torch.bucketize(overlap.float().contiguous(), self.overlap_edges, right=True)

    def columns_of(self, rows: Tensor, agreement: Tensor) -> Tensor:
        """Bin index of each A within its row; any shape."""
        return (agreement.unsqueeze(-1) >= self.agreement_edges[rows]).sum(dim=-1)

    def cells_of(self, overlap: Floats, agreement: Floats) -> NDArray[np.int64]:
        """``[n]`` index of each record's cell, in row-major order."""
        rows = self.rows_of(torch.from_numpy(overlap))
        columns = self.columns_of(rows, torch.from_numpy(agreement))
        cells: NDArray[np.int64] = (rows * self.shape[1] + columns).numpy()
        return cells

    def centres(self) -> tuple[Floats, Floats]:
        """S and A at the centre of each cell, ``[rows * columns]`` each."""
        rows, columns = self.shape
        across = np.concatenate([[0.0], self.overlap_edges.cpu().numpy(), [1.0]])
        along = np.pad(
            self.agreement_edges.cpu().numpy(), ((0, 0), (1, 1)), constant_values=(0.0, 1.0)
        ).clip(max=1.0)
        overlap = np.repeat((across[1:] + across[:-1]) / 2, columns)
        agreement = ((along[:, 1:] + along[:, :-1]) / 2).reshape(rows * columns)
        return overlap.astype(np.float32), agreement.astype(np.float32)

    def to(self, device: torch.device) -> Grid:
        """Copy the grid to a device."""
        return Grid(self.overlap_edges.to(device), self.agreement_edges.to(device))


def uniform_grid(rows: int, columns: int) -> Grid:
    """A grid of bins of equal width."""
    across = np.arange(1, rows) / rows
    along = np.tile(np.arange(1, columns) / columns, (rows, 1))
    return Grid(
        torch.from_numpy(across.astype(np.float32)), torch.from_numpy(along.astype(np.float32))
    )


def adaptive_grid(overlap: Floats, agreement: Floats, weight: Floats) -> Grid:
    """A grid whose bins are narrow where records are dense.

    All rows hold about equal weights of records, and so do the bins of each row. A single value
    with more weight than a bin, such as A = 1, has a bin of its own. The number of cells is the
    number of records divided by 20, but at most 400, which is the number of a 20 × 20 grid (the
    paper's example has 272). With fewer than 500 records the grid has 5 × 5 bins of equal width.

    Args:
        overlap: ``[n]`` S.
        agreement: ``[n]`` A.
        weight: ``[n]`` weight of each record.
    """
    total = float(weight.sum())
    if total < _MIN_ADAPTIVE_RECORDS:
        return uniform_grid(5, 5)
    num_cells = min(_MAX_CELLS, int(total / _RECORDS_PER_CELL))
    num_rows = math.isqrt(num_cells)
    across = quantile_edges(overlap, num_rows, weight)
    row = np.searchsorted(across, overlap, side="right")
    along = [
        quantile_edges(agreement[row == index], num_cells // num_rows, weight[row == index])
        for index in range(len(across) + 1)
    ]
    padded = np.full((len(along), max(map(len, along))), np.inf, dtype=np.float32)
    for index, edges in enumerate(along):
        padded[index, : len(edges)] = edges
    return Grid(torch.from_numpy(across), torch.from_numpy(padded))


def quantile_edges(values: Floats, num_bins: int, weight: Floats | None = None) -> Floats:
    """Ascending edges between at most ``num_bins`` bins of about equal weight.

    No bin is empty. A value with more weight than a bin has a bin of its own, and the weight of
    the other values is divided equally between the other bins.

    Args:
        values: ``[n]`` non-negative.
        num_bins: maximum number of bins.
        weight: ``[n]`` weight of each value; ``None`` for 1.
    """
    if not len(values) or (weight is not None and not weight.any()):
        return np.empty(0, dtype=np.float32)
    values = np.where(values < _SMALLEST_POSITIVE, 0.0, values).astype(np.float32)
    distinct, number = np.unique(values, return_inverse=True)
    weights = np.bincount(number, weights=weight).astype(np.float64)
    alone = _outweigh_a_bin(weights, num_bins)
    heavy = np.flatnonzero(alone)
    shared = np.concatenate([[0.0], np.cumsum(np.where(alone, 0.0, weights))])
    edges: list[float] = []
    first, num_left = 0, num_bins
    while num_left > 1:
        heavy = heavy[heavy >= first]
        is_alone = len(heavy) > 0 and heavy[0] == first
        if is_alone:
            end = first + 1
        else:
            share = (shared[-1] - shared[first]) / max(num_left - len(heavy), 1)
            end = first + 1 + int(np.searchsorted(shared[first + 1 :], shared[first] + share))
            if len(heavy):
                end = min(end, int(heavy[0]))
        if end >= len(distinct):
            break
        # A value's own bin ends directly above the value, so it contains no other value.
        above = max(np.nextafter(distinct[first], np.float32(2)), np.float32(_SMALLEST_POSITIVE))
        edges.append(above if is_alone else distinct[end])
        first, num_left = end, num_left - 1
    return np.array(edges, dtype=np.float32)


def _outweigh_a_bin(weights: NDArray[np.float64], num_bins: int) -> NDArray[np.bool_]:
    """``[n]`` whether a value has more weight than a bin of the remaining values."""
    alone = np.zeros(len(weights), dtype=np.bool_)
    while (num_left := num_bins - int(alone.sum())) > 1:
        share = weights[~alone].sum() / num_left
        heavier = ~alone & (weights > share)
        if not heavier.any():
            break
        alone |= heavier
    return alone
