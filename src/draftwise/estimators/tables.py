"""P(accept | S, A) as a table of empirical means.

S = Σ min(q, c) and A = min(1, c(x)/q(x)) are cut into bins (Kim et al. 2025, "Speculative
Verification"): grids of 5 × 5, 10 × 10 and 20 × 20 equal bins, or an adaptive one. Along A a table
never falls, whatever the data say: then "keep the token if P ≥ t" is "keep it if A ≥ a", a rule
that one comparison applies to the whole vocabulary.
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
from draftwise.estimators.calibration import RunningCalibration
from draftwise.estimators.records import Records

Doubles = NDArray[np.float64]

# From coarse to fine; the adaptive grid stands on all but the finest.
_UNIFORM = {"5x5": (5, 5), "10x10": (10, 10), "20x20": (20, 20)}
BINNINGS = (*_UNIFORM, "adaptive")

# Records that what is known beforehand is worth, in a cell and over the whole table: at least, and
# at most, so that a table made from much data still learns.
_CELL_STRENGTH = 8.0
_MOST_CELL_STRENGTH = 64.0
_TABLE_STRENGTH = 64.0
# Observations after which an older one counts half, and between two rebuildings of the table.
_HALF_LIFE = 5000.0
_REBUILD_AFTER = 256.0

# P ≈ offset + slopes · (S, A), where nothing better is known.
_PRIOR_OFFSET, _PRIOR_OVERLAP, _PRIOR_AGREEMENT = 0.15, 0.4, 0.35


class AcceptanceTable:
    """P(accept | S, A): fitted once, then following what is observed.

    The estimate of a cell is the mean of its records and of what is known without them: the prior,
    corrected by ever finer tables, which a cell without records falls back to. Observations are
    weighed against the table as it was made in the same way, and fade.

    Attributes:
        grid: the bins.
        values: ``[rows, columns]`` float32 in [0, 1], non-decreasing along a row; bins that a row
            does not have repeat its last.
    """

    def __init__(self, grid: Grid, values: Tensor, weights: Tensor) -> None:
        """Take a table as it is.

        Args:
            grid: the bins.
            values: ``[rows, columns]`` probabilities, non-decreasing along A.
            weights: ``[rows, columns]`` records behind each.

        Raises:
            ValueError: the three do not fit together.
        """
        if not grid.shape == tuple(values.shape) == tuple(weights.shape):
            raise ValueError("a table needs a value and a weight for every cell")
        if not bool(((values >= 0) & (values <= 1)).all()):
            raise ValueError("values must be probabilities")
        if bool((values[:, 1:] < values[:, :-1]).any()):
            raise ValueError("values must not fall along A")
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError("weights must be non-negative numbers")
        self.grid = grid
        self.values = values.float()
        self._weights = weights.float()
        self._made: Doubles = values.double().flatten().cpu().numpy()
        strength = weights.double().flatten().cpu().numpy() + _CELL_STRENGTH
        self._strength: Doubles = strength.clip(max=_MOST_CELL_STRENGTH)
        self._seen = np.zeros(values.numel())
        self._accepted = np.zeros(values.numel())
        self._since_rebuilt = 0.0
        self._calibration = RunningCalibration(_HALF_LIFE)

    @classmethod
    def fit(cls, records: Records, binning: str) -> AcceptanceTable:
        """Means of the acceptance probability, a record counting as far as it was reached.

        Args:
            records: of plain speculative decoding with a companion; without any, the prior.
            binning: one of :data:`BINNINGS`.

        Raises:
            InvalidParameterError: there is no such binning.
        """
        if binning not in BINNINGS:
            raise InvalidParameterError(
                "binning", f"must be one of {', '.join(BINNINGS)}, got {binning!r}"
            )
        weight = records.reached()
        if binning == "adaptive":
            grid = adaptive_grid(records.overlap, records.agreement, weight)
            coarser = [_UNIFORM["5x5"], _UNIFORM["10x10"]]
        else:
            grid = uniform_grid(*_UNIFORM[binning])
            coarser = [_UNIFORM[name] for name in takewhile(lambda name: name != binning, _UNIFORM)]
        # As a whole, then by A alone, which tells most, then by both.
        known = _refined_prior(records, weight, grid, [(1, 1), (1, 5), *coarser])
        cells = grid.cells_of(records.overlap, records.agreement)
        counts = np.bincount(cells, weight, minlength=len(known)).astype(np.float64)
        sums = np.bincount(cells, weight * records.acceptance, minlength=len(known))
        means = (_CELL_STRENGTH * known + sums) / (_CELL_STRENGTH + counts)
        values = _monotone(grid, means, counts + _CELL_STRENGTH)
        return cls(grid, values, torch.from_numpy(counts).float().view(values.shape))

    @classmethod
    def prior(cls) -> AcceptanceTable:
        """A table for models of which nothing is known, to be corrected by :meth:`observe`.

        What a companion would accept the target mostly does too, the more so where draft and
        companion agree throughout: 0.15 + 0.4·S + 0.35·A in 10 × 10 bins.
        """
        return cls.fit(Records.empty(), "10x10")

    @property
    def num_cells(self) -> int:
        """Cells of the grid."""
        return self.grid.num_cells

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the predictions for what was observed lately."""
        return self._calibration.error

    def predict(self, overlap: Tensor, agreement: Tensor) -> Tensor:
        """P(accept) for each S and A; elementwise, any shape, float32."""
        rows = self.grid.rows_of(overlap)
        return self.values[rows, self.grid.columns_of(rows, agreement)]

    def threshold(self, overlap: Tensor, probability: Tensor) -> Tensor:
        """Smallest A in [0, 1] with ``predict(S, A) >= probability``; infinite if there is none.

        For every A, ``predict(S, A) >= probability`` exactly if ``A >= threshold``.

        Args:
            overlap: ``[...]`` S.
            probability: ``[...]``.
        """
        rows = self.grid.rows_of(overlap)
        enough = self.values[rows] >= probability.unsqueeze(-1)
        return self.grid.lower_edges[rows, (~enough).sum(dim=-1)]

    def observe(
        self,
        overlap: Tensor,
        agreement: Tensor,
        acceptance: Tensor,
        weight: Tensor | None = None,
    ) -> None:
        """Learn from verified tokens; the values follow after every 256 of them.

        Args:
            overlap: ``[...]`` S.
            agreement: ``[...]`` A.
            acceptance: ``[...]`` acceptance probability of the token, or whether it was accepted.
            weight: ``[...]`` probability that the tokens before it were kept; ``None`` for 1.
        """
        rows = self.grid.rows_of(overlap)
        columns = self.grid.columns_of(rows, agreement)
        predicted = self.values[rows, columns].flatten().cpu().numpy()
        cells = (rows * self.grid.shape[1] + columns).flatten().cpu().numpy()
        happened = acceptance.double().flatten().cpu().numpy()
        counts = np.ones(len(cells)) if weight is None else weight.double().flatten().cpu().numpy()
        self._calibration.observe(predicted, happened, counts)
        kept = 0.5 ** (counts.sum() / _HALF_LIFE)
        self._seen = kept * self._seen + np.bincount(cells, counts, minlength=len(self._seen))
        self._accepted = kept * self._accepted + np.bincount(
            cells, counts * happened, minlength=len(self._seen)
        )
        self._since_rebuilt += counts.sum()
        if self._since_rebuilt >= _REBUILD_AFTER:
            self._rebuild()

    def _rebuild(self) -> None:
        """Move the table as a whole, then each cell, towards what was seen."""
        self._since_rebuilt = 0.0
        surplus = (self._accepted - self._seen * self._made).sum()
        shifted = (self._made + surplus / (self._seen.sum() + _TABLE_STRENGTH)).clip(0.0, 1.0)
        strength = self._strength + self._seen
        means = (self._strength * shifted + self._accepted) / strength
        self.values = _monotone(self.grid, means, strength).to(self.values.device)

    def to(self, device: torch.device) -> AcceptanceTable:
        """A copy on a device that has observed nothing."""
        made = torch.from_numpy(self._made).float().view(self.values.shape)
        return AcceptanceTable(self.grid.to(device), made.to(device), self._weights.to(device))

    def to_tensors(self) -> dict[str, Tensor]:
        """The table as it was made, for a file; observations are left out."""
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
            ValueError: they are not those of a table.
            KeyError: one is missing.
        """
        grid = Grid(tensors["overlap_edges"], tensors["agreement_edges"])
        return cls(grid, tensors["values"], tensors["weights"])


def _refined_prior(
    records: Records, weight: NDArray[np.float32], grid: Grid, shapes: list[tuple[int, int]]
) -> Doubles:
    """``[cells]`` what ever finer uniform tables make of the prior, in the middle of each cell.

    Each level adds the mean residual of each of its cells, pulled towards 0.
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
    """``[n]`` P(accept) where no data says otherwise."""
    slope = _PRIOR_OVERLAP * overlap.astype(np.float64) + _PRIOR_AGREEMENT * agreement
    return _PRIOR_OFFSET + slope


def _monotone(grid: Grid, means: Doubles, weights: Doubles) -> Tensor:
    """``[rows, columns]`` the nearest values (least squares) that do not fall along a row."""
    values = means.reshape(grid.shape).clip(0.0, 1.0)
    weights = weights.reshape(grid.shape)
    for row, count in enumerate(grid.num_columns):
        fitted = isotonic_regression(values[row, :count], weights=weights[row, :count])
        values[row, :count] = fitted.x
        values[row, count:] = fitted.x[-1]
    return torch.from_numpy(values.clip(0.0, 1.0)).float()
