"""Calibration error of probability predictions."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.floating[Any]]

_NUM_BINS = 10
# Predictions of a bin that a reliability curve shows.
_FEWEST = 5


class RunningCalibration:
    """Expected calibration error of a stream of predictions.

    Predictions are put into ten bins of equal width (Naeini et al. 2015, "Obtaining Well Calibrated
    Probabilities Using Bayesian Binning", section "Evaluation"). The error is the weighted mean
    over bins of the absolute difference between mean prediction and mean outcome.
    """

    def __init__(self) -> None:
        """Start without observations."""
        self._weight = np.zeros(_NUM_BINS)
        self._predicted = np.zeros(_NUM_BINS)
        self._happened = np.zeros(_NUM_BINS)

    def observe(
        self, predicted: ArrayLike, outcome: ArrayLike, weight: ArrayLike | None = None
    ) -> None:
        """Add predictions and their outcomes.

        Args:
            predicted: probabilities, any shape.
            outcome: outcomes of the same shape: 0, 1, or a true probability.
            weight: weight of each prediction; ``None`` for 1.
        """
        p = np.asarray(predicted, dtype=np.float64).ravel()
        x = np.asarray(outcome, dtype=np.float64).ravel()
        w = np.ones(len(p)) if weight is None else np.asarray(weight, dtype=np.float64).ravel()
        index = np.minimum((p * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        for total, added in ((self._weight, w), (self._predicted, w * p), (self._happened, w * x)):
            total += np.bincount(index, added, minlength=_NUM_BINS)

    @property
    def error(self) -> float:
        """Expected calibration error, 0 … 1; 0 without observations."""
        whole = self._weight.sum()
        if whole <= 0:
            return 0.0
        return float(np.abs(self._predicted - self._happened).sum() / whole)


class CurvePoint(TypedDict):
    """A bin of a reliability curve: mean prediction, mean outcome, and total weight."""

    predicted: float
    observed: float
    weight: float


def reliability(
    predicted: Values, outcome: Values, weight: Values
) -> tuple[float, list[CurvePoint]]:
    """The expected calibration error and the reliability curve of predictions.

    Args:
        predicted: ``[n]`` probabilities.
        outcome: ``[n]`` outcomes, which may be true probabilities.
        weight: ``[n]`` weight of each prediction.

    Returns:
        The error, and the points of bins with at least five predictions.
    """
    calibration = RunningCalibration()
    calibration.observe(predicted, outcome, weight)
    bins = np.minimum((predicted * _NUM_BINS).astype(int), _NUM_BINS - 1)
    curve: list[CurvePoint] = []
    for number in range(_NUM_BINS):
        here = (bins == number) & (weight > 0)
        if here.sum() >= _FEWEST:
            curve.append(
                {
                    "predicted": float(np.average(predicted[here], weights=weight[here])),
                    "observed": float(np.average(outcome[here], weights=weight[here])),
                    "weight": float(weight[here].sum()),
                }
            )
    return calibration.error, curve
