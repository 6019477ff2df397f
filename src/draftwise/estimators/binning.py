"""Bins of two signals, S and A, each in [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.estimators.records import Floats

# Most cells of an adaptive grid, the records that make one cell on average, and the records below
# which bins cannot follow the data.
_MOST_CELLS = 400
_RECORDS_PER_CELL = 20
_FEWEST_RECORDS = 500
# Keeps exact zeros, of which top-k and top-p make many, apart from what is merely small.
_ABOVE_ZERO = 1e-30


@dataclass(frozen=True)
class Grid:
    """Rows along S, and in each row bins of its own along A.

    A value on an edge belongs to the bin above it.

    Attributes:
        overlap_edges: ``[rows - 1]`` float32 ascending, between the rows.
        agreement_edges: ``[rows, columns - 1]`` float32 ascending, between the bins of each row;
            infinite where a row has fewer bins than the longest.
    """

    overlap_edges: Tensor
    agreement_edges: Tensor

    def __post_init__(self) -> None:
        shape = self.agreement_edges.shape
        if len(shape) != 2 or self.overlap_edges.shape != (shape[0] - 1,):
            raise ValueError("a grid needs edges along A for every row along S")
        for edges in (self.overlap_edges, self.agreement_edges):
            finite = edges.isfinite()
            rising = (edges[..., 1:] > edges[..., :-1]) | ~finite[..., 1:]
            if not bool((rising & (finite[..., :-1] | ~finite[..., 1:])).all()):
                raise ValueError("edges must rise")
            if not bool(((edges > 0) & (edges <= 1) | (edges == math.inf)).all()):
                raise ValueError("edges must lie in (0, 1]")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, inner_edges = self.agreement_edges.shape
        return rows, inner_edges + 1

    @cached_property
    def num_columns(self) -> list[int]:
        """Bins of each row."""
        counts: list[int] = (self.agreement_edges.isfinite().sum(dim=1) + 1).tolist()
        return counts

    @property
    def num_cells(self) -> int:
        """Cells of all rows."""
        return sum(self.num_columns)

    @cached_property
    def lower_edges(self) -> Tensor:
        """``[rows, columns + 1]`` smallest A of each bin; infinite where there is none."""
        none = self.agreement_edges.new_full((self.shape[0], 1), math.inf)
        return torch.cat([torch.zeros_like(none), self.agreement_edges, none], dim=1)

    def rows_of(self, overlap: Tensor) -> Tensor:
        """Row of each S; any shape."""
        return torch.bucketize(overlap.float().contiguous(), self.overlap_edges, right=True)

    def columns_of(self, rows: Tensor, agreement: Tensor) -> Tensor:
        """Bin of each A within its row; any shape."""
        return (agreement.unsqueeze(-1) >= self.agreement_edges[rows]).sum(dim=-1)

    def cells_of(self, overlap: Floats, agreement: Floats) -> NDArray[np.int64]:
        """``[n]`` number of each record's cell, row after row."""
        rows = self.rows_of(torch.from_numpy(overlap))
        columns = self.columns_of(rows, torch.from_numpy(agreement))
        cells: NDArray[np.int64] = (rows * self.shape[1] + columns).numpy()
        return cells

    def centres(self) -> tuple[Floats, Floats]:
        """``[rows * columns]`` S and A in the middle of each cell."""
        rows, columns = self.shape
        across = np.concatenate([[0.0], self.overlap_edges.cpu().numpy(), [1.0]])
        along = self.lower_edges.cpu().numpy().clip(max=1.0)
        overlap = np.repeat((across[1:] + across[:-1]) / 2, columns)
        agreement = ((along[:, 1:] + along[:, :-1]) / 2).reshape(rows * columns)
        return overlap.astype(np.float32), agreement.astype(np.float32)

    def to(self, device: torch.device) -> Grid:
        """The same on a device."""
        return Grid(self.overlap_edges.to(device), self.agreement_edges.to(device))


def uniform_grid(rows: int, columns: int) -> Grid:
    """Bins of equal width."""
    across = np.arange(1, rows) / rows
    along = np.tile(np.arange(1, columns) / columns, (rows, 1))
    return Grid(
        torch.from_numpy(across.astype(np.float32)), torch.from_numpy(along.astype(np.float32))
    )


def adaptive_grid(overlap: Floats, agreement: Floats, weight: Floats) -> Grid:
    """Bins that are narrow where records are dense.

    Rows hold equal weights of records, and so do the bins of each row; a value that more records
    share than belong in a bin (A = 1 above all) has one to itself, and the others share the rest.
    There are as many cells as give each 20 records, at most 400, as many as 20 × 20 equal ones
    (the paper's example has 272); with fewer than 500 records, 5 × 5 equal ones.

    Args:
        overlap: ``[n]`` S.
        agreement: ``[n]`` A.
        weight: ``[n]`` how much each record counts.
    """
    total = float(weight.sum())
    if total < _FEWEST_RECORDS:
        return uniform_grid(5, 5)
    num_cells = min(_MOST_CELLS, int(total / _RECORDS_PER_CELL))
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
    """Ascending edges between at most so many bins of about equal weight; none is empty.

    A value that outweighs a bin has one to itself; the weight of the others is what is shared out.

    Args:
        values: ``[n]`` non-negative.
        num_bins: at most.
        weight: ``[n]``; ``None`` for 1 each.
    """
    if not len(values) or (weight is not None and not weight.any()):
        return np.empty(0, dtype=np.float32)
    values = np.where(values < _ABOVE_ZERO, 0.0, values).astype(np.float32)
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
        # What was never seen is not of a value's own bin, however near.
        above = max(np.nextafter(distinct[first], np.float32(2)), np.float32(_ABOVE_ZERO))
        edges.append(above if is_alone else distinct[end])
        first, num_left = end, num_left - 1
    return np.array(edges, dtype=np.float32)


def _outweigh_a_bin(weights: NDArray[np.float64], num_bins: int) -> NDArray[np.bool_]:
    """``[n]`` which of ``n`` values weigh more than each bin of the others."""
    alone = np.zeros(len(weights), dtype=np.bool_)
    while (num_left := num_bins - int(alone.sum())) > 1:
        share = weights[~alone].sum() / num_left
        heavier = ~alone & (weights > share)
        if not heavier.any():
            break
        alone |= heavier
    return alone
