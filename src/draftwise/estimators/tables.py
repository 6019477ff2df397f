"""P(accept | S, A) as a table of empirical means.

S = Σ min(q, c) and A = min(1, c(x)/q(x)) are binned (Kim et al. 2025, "Speculative Verification"):
in a grid of 5 × 5, 10 × 10 or 20 × 20 equal bins, or in an adaptive grid. Table values are
constrained to be non-decreasing in A.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from draftwise.errors import InvalidParameterError
from draftwise.estimators.binning import Grid, adaptive_grid, uniform_grid
from draftwise.estimators.records import Records

Doubles = NDArray[np.float64]

# From coarse to fine. The prior of the adaptive grid is refined with all but the finest.
_UNIFORM = {"5x5": (5, 5), "10x10": (10, 10), "20x20": (20, 20)}
BINNINGS = (*_UNIFORM, "adaptive")

# Weight of the prior in records: of a cell, the maximum of a cell (so that a table fitted to much
# data still adapts), and of the whole table.
_CELL_STRENGTH = 8.0
_MAX_CELL_STRENGTH = 64.0
_TABLE_STRENGTH = 64.0
# Observations after which the weight of an older one halves, and between two rebuilds of the table.
_HALF_LIFE = 5000.0
_REBUILD_AFTER = 256.0

# Prior mean: P ≈ offset + slopes · (S, A).
_PRIOR_OFFSET, _PRIOR_OVERLAP, _PRIOR_AGREEMENT = 0.15, 0.4, 0.35


class AcceptanceTable:
    """P(accept | S, A): fitted once, then updated online.

    The estimate of a cell is the weighted mean of its records and its prior. The prior is a linear
    function of S and A, corrected by successively finer tables. A cell without records has the
    value of its prior. Online, the fitted table is the prior of the observations in the same way,
    and observations are forgotten exponentially.

    Attributes:
        grid: the bins.
        values: ``[rows, columns]`` float32 in [0, 1], non-decreasing along a row. Rows with fewer
            bins are padded with their last value.
    """

    def __init__(self, grid: Grid, values: Tensor, weights: Tensor) -> None:
        """Create a table from its values.

        Args:
            grid: the bins.
            values: ``[rows, columns]`` probabilities, non-decreasing along A.
            weights: ``[rows, columns]`` weight of the records in each cell.

        Raises:
            ValueError: the shapes differ, or values or weights are out of range.
        """
        if not grid.shape == tuple(values.shape) == tuple(weights.shape):
            raise ValueError("a table needs a value and a weight for every cell")
        if not bool(((values >= 0) & (values <= 1)).all()):
            raise ValueError("values must be probabilities")
        if bool((values[:, 1:] < values[:, :-1]).any()):
            raise ValueError("values must not decrease along A")
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError("weights must be finite and non-negative")
        self.grid = grid
        self.values = values.float()
        self._weights = weights.float()
        self._made: Doubles = values.double().flatten().cpu().numpy()
        strength = weights.double().flatten().cpu().numpy() + _CELL_STRENGTH
        self._strength: Doubles = strength.clip(max=_MAX_CELL_STRENGTH)
        self._seen = np.zeros(values.numel())
        self._accepted = np.zeros(values.numel())
        self._since_rebuilt = 0.0

    @classmethod
    def fit(cls, records: Records, binning: str) -> AcceptanceTable:
        """Fit a table to the acceptance probabilities of records.

        Each record is weighted by the probability that all tokens before it are accepted.

        Args:
            records: records of plain speculative decoding with a companion. Without records, the
                table is the prior.
            binning: one of :data:`BINNINGS`.

        Raises:
            InvalidParameterError: ``binning`` is unknown.
        """
        if binning not in BINNINGS:
            raise InvalidParameterError(
                "binning", f"must be one of {', '.join(BINNINGS)}, got {binning!r}"
            )
        weight = records.reach_probability()
        if binning == "adaptive":
            grid = adaptive_grid(records.overlap, records.agreement, weight)
            coarser = [_UNIFORM["5x5"], _UNIFORM["10x10"]]
        else:
            grid = uniform_grid(*_UNIFORM[binning])
            coarser = [_UNIFORM[name] for name in takewhile(lambda name: name != binning, _UNIFORM)]
        # First a constant, then A alone, the most informative signal, then both signals.
        known = _refined_prior(records, weight, grid, [(1, 1), (1, 5), *coarser])
        cells = grid.cells_of(records.overlap, records.agreement)
        counts = np.bincount(cells, weight, minlength=len(known)).astype(np.float64)
        sums = np.bincount(cells, weight * records.acceptance, minlength=len(known))
        means = (_CELL_STRENGTH * known + sums) / (_CELL_STRENGTH + counts)
        values = _monotone(grid, means, counts + _CELL_STRENGTH)
        return cls(grid, values, torch.from_numpy(counts).float().view(values.shape))

    @classmethod
    def prior(cls) -> AcceptanceTable:
        """A table for models without a profile, to be corrected by :meth:`observe`.

        The target mostly accepts the tokens that the companion would accept, and more so where the
        distributions of draft and companion overlap. The values are 0.15 + 0.4·S + 0.35·A, in
        10 × 10 bins.
        """
        return cls.fit(Records.empty(), "10x10")

    @property
    def num_cells(self) -> int:
        """Number of cells of the grid."""
        return self.grid.num_cells

    def predict(self, overlap: Tensor, agreement: Tensor) -> Tensor:
        """P(accept) of each S and A; elementwise, any shape, float32."""
        rows = self.grid.rows_of(overlap)
        return self.values[rows, self.grid.columns_of(rows, agreement)]

    def observe(
        self,
        overlap: Tensor,
        agreement: Tensor,
        acceptance: Tensor,
        weight: Tensor | None = None,
    ) -> None:
        """Add observations of verified tokens. The values are updated after every 256 of them.

        Args:
            overlap: ``[...]`` S.
            agreement: ``[...]`` A.
            acceptance: ``[...]`` acceptance probability of the token, or whether it was accepted.
            weight: ``[...]`` probability that the tokens before it are accepted; ``None`` for 1.
        """
        rows = self.grid.rows_of(overlap)
        columns = self.grid.columns_of(rows, agreement)
        cells = (rows * self.grid.shape[1] + columns).flatten().cpu().numpy()
        happened = acceptance.double().flatten().cpu().numpy()
        counts = np.ones(len(cells)) if weight is None else weight.double().flatten().cpu().numpy()
        kept = 0.5 ** (counts.sum() / _HALF_LIFE)
        self._seen = kept * self._seen + np.bincount(cells, counts, minlength=len(self._seen))
        self._accepted = kept * self._accepted + np.bincount(
            cells, counts * happened, minlength=len(self._seen)
        )
        self._since_rebuilt += counts.sum()
        if self._since_rebuilt >= _REBUILD_AFTER:
            self._rebuild()

    def _rebuild(self) -> None:
        """Move the whole table, then each cell, towards the observations."""
        self._since_rebuilt = 0.0
        surplus = (self._accepted - self._seen * self._made).sum()
        shifted = (self._made + surplus / (self._seen.sum() + _TABLE_STRENGTH)).clip(0.0, 1.0)
        strength = self._strength + self._seen
        means = (self._strength * shifted + self._accepted) / strength
        self.values = _monotone(self.grid, means, strength).to(self.values.device)

    def to(self, device: torch.device) -> AcceptanceTable:
        """Copy the table, without its observations, to a device."""
        made = torch.from_numpy(self._made).float().view(self.values.shape)
        return AcceptanceTable(self.grid.to(device), made.to(device), self._weights.to(device))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the table without its observations as named tensors, for a file."""
        return {
            "overlap_edges": self.grid.overlap_edges.cpu(),
            "agreement_edges": self.grid.agreement_edges.cpu(),
            "values": torch.from_numpy(self._made).float().view(self.values.shape),
            "weights": self._weights.cpu(),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> AcceptanceTable:
        """The inverse of :meth:`to_tensors`.

        Raises:
            ValueError: the tensors do not describe a table.
            KeyError: a tensor is missing.
        """
        grid = Grid(tensors["overlap_edges"], tensors["agreement_edges"])
        return cls(grid, tensors["values"], tensors["weights"])


def _refined_prior(
    records: Records, weight: NDArray[np.float32], grid: Grid, shapes: list[tuple[int, int]]
) -> Doubles:
    """``[cells]`` the prior at the centre of each cell, corrected by successively finer tables.

    Each level adds the mean residual of each of its cells, shrunk towards 0.
    """
    centres = grid.centres()
    at_records = _prior_mean(records.overlap, records.agreement)
    at_cells = _prior_mean(*centres)
    for shape in shapes:
        level = uniform_grid(*shape)
        cells = level.cells_of(records.overlap, records.agreement)
        size = shape[0] * shape[1]
        counts = np.bincount(cells, weight, minlength=size)
        residuals = np.bincount(cells, weight * (records.acceptance - at_records), minlength=size)
        correction = residuals / (counts + _CELL_STRENGTH)
        at_records = at_records + correction[cells]
        at_cells = at_cells + correction[level.cells_of(*centres)]
    return at_cells


def _prior_mean(overlap: NDArray[np.float32], agreement: NDArray[np.float32]) -> Doubles:
    """``[n]`` prior mean of P(accept)."""
    slope = _PRIOR_OVERLAP * overlap.astype(np.float64) + _PRIOR_AGREEMENT * agreement
    return _PRIOR_OFFSET + slope


def _monotone(grid: Grid, means: Doubles, weights: Doubles) -> Tensor:
    """``[rows, columns]`` the least-squares fit that does not decrease along a row."""
    values = means.reshape(grid.shape).clip(0.0, 1.0)
    weights = weights.reshape(grid.shape)
    for row, count in enumerate(grid.num_columns):
        fitted = isotonic_regression(values[row, :count], weights=weights[row, :count])
        values[row, :count] = fitted.x
        values[row, count:] = fitted.x[-1]
    return torch.from_numpy(values.clip(0.0, 1.0)).float()
