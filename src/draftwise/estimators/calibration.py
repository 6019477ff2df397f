"""How far predicted probabilities are from what happened, lately."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

_NUM_BINS = 10


class RunningCalibration:
    """Expected calibration error of a stream of predictions, older ones fading.

    Predictions are put into ten bins of equal width (Naeini et al. 2015, "Obtaining Well Calibrated
    Probabilities Using Bayesian Binning", section "Evaluation"). In each, their mean is compared
    with the mean outcome; the error is the mean difference, bins counting by their weight.
    """

    def __init__(self, half_life: float = np.inf) -> None:
        """Nothing seen yet.

        Args:
            half_life: weight of later predictions after which one counts half.
        """
        self._half_life = half_life
        self._weight = np.zeros(_NUM_BINS)
        self._predicted = np.zeros(_NUM_BINS)
        self._happened = np.zeros(_NUM_BINS)

    def observe(
        self, predicted: ArrayLike, outcome: ArrayLike, weight: ArrayLike | None = None
    ) -> None:
        """Take predictions and what they were about, of any one shape.

        Args:
            predicted: probabilities.
            outcome: what happened: 0, 1, or a probability that is known now.
            weight: how much each counts; ``None`` for 1.
        """
        p = np.asarray(predicted, dtype=np.float64).ravel()
        x = np.asarray(outcome, dtype=np.float64).ravel()
        w = np.ones(len(p)) if weight is None else np.asarray(weight, dtype=np.float64).ravel()
        kept = 0.5 ** (w.sum() / self._half_life)
        index = np.minimum((p * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        for total, added in ((self._weight, w), (self._predicted, w * p), (self._happened, w * x)):
            total *= kept
            total += np.bincount(index, added, minlength=_NUM_BINS)

    @property
    def error(self) -> float:
        """Expected calibration error, 0 … 1; 0 before anything was seen."""
        whole = self._weight.sum()
        if whole <= 0:
            return 0.0
        return float(np.abs(self._predicted - self._happened).sum() / whole)

    @property
    def weight(self) -> float:
        """How much was seen, older predictions counting less."""
        return float(self._weight.sum())
