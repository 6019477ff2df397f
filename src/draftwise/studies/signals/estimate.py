"""P(accept | signals) on prompts that an estimate has not seen, and the information in it.

The log-odds of acceptance are additive in the position and in each signal, with a piecewise linear
function of each, plus the products of all pairs of signals. The weights are fitted by Newton's
method, with a small ridge penalty, to the acceptance probability itself. Each token is weighted by
the probability that it is reached.

The information of signals Z about X, whether a token is accepted, is estimated as the decrease of
the mean code length, H(X) − E[−log₂ P̂(X | Z)], in bits. P̂ is fitted to other prompts. So the
estimate is below the mutual information by what the model misses, and noise does not raise it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwise.estimators.records import Integers, Records

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

NUM_FOLDS = 5
# Predictions stay within these bounds, so that one token cannot cost many bits.
LOWEST, HIGHEST = 0.002, 0.998
_PROBABILITIES = {"token_prob", "top_prob", "overlap", "agreement", "confidence"}
_SMALLEST_ODDS = 1e-4
_KNOTS = (0.1, 0.25, 0.5, 0.75, 0.9)
_RIDGE = 10.0
_NEWTON_STEPS = 25


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens with its standard error over prompts."""

    mean: float
    error: float

    def to_dict(self) -> dict[str, float]:
        """Return the estimate as JSON-compatible values."""
        return {"mean": self.mean, "error": self.error}


def folds(prompts: Integers, num_folds: int = NUM_FOLDS) -> Iterator[tuple[Booleans, Booleans]]:
    """Split tokens by their prompts into parts to fit to and parts to predict.

    Args:
        prompts: ``[n]`` prompt of each token or draft.
        num_folds: number of folds; fewer if there are fewer prompts.
    """
    _, place = np.unique(prompts, return_inverse=True)
    num_folds = min(num_folds, int(place.max()) + 1)
    for fold in range(num_folds):
        held_out = place % num_folds == fold
        yield ~held_out, held_out


class Basis:
    """The features of some signals, with knots and scales of the tokens that are fitted to."""

    def __init__(self, records: Records, columns: Sequence[str]) -> None:
        """Choose the knots.

        Args:
            records: the tokens that are fitted to.
            columns: names of the signals.
        """
        self._columns = tuple(columns)
        self._num_positions = int(records.position.max(initial=0)) + 1
        self._knots: dict[str, Floats] = {}
        self._scales: dict[str, tuple[float, float]] = {}
        for name in self._columns:
            values = _transformed(records, name)
            self._scales[name] = float(values.mean()), max(float(values.std()), 1e-6)
            inner = np.unique(np.quantile(self._scaled(records, name), _KNOTS))
            self._knots[name] = inner

    def features(self, records: Records) -> Floats:
        """``[n, features]``, the first of which is 1."""
        position = np.minimum(records.position, self._num_positions - 1)
        columns = [np.ones(len(records))]
        columns += [(position == place).astype(float) for place in range(1, self._num_positions)]
        place = position / max(1, self._num_positions - 1)
        scaled = [self._scaled(records, name) for name in self._columns]
        for number, (name, values) in enumerate(zip(self._columns, scaled, strict=True)):
            columns.append(values)
            columns += [np.maximum(values - knot, 0.0) for knot in self._knots[name]]
            columns.append(values * place)
            columns += [values * other for other in scaled[:number]]
        return np.column_stack(columns)

    def _scaled(self, records: Records, name: str) -> Floats:
        mean, deviation = self._scales[name]
        return np.clip((_transformed(records, name) - mean) / deviation, -4.0, 4.0)


def _transformed(records: Records, name: str) -> Floats:
    values = np.asarray(getattr(records, name), dtype=np.float64)
    if name not in _PROBABILITIES:
        return values
    p = np.clip(values, _SMALLEST_ODDS, 1 - _SMALLEST_ODDS)
    return np.log(p / (1 - p))


def fitted(features: Floats, labels: Floats, weights: Floats, ridge: float) -> Floats:
    """Weights of a logistic regression on soft labels, by Newton's method.

    Args:
        features: ``[n, features]``, the first of which is 1 and is not penalised.
        labels: ``[n]`` probabilities.
        weights: ``[n]`` weight of each label.
        ridge: strength of the penalty.
    """
    theta = np.zeros(features.shape[1])
    penalty = np.full(len(theta), ridge)
    penalty[0] = 1e-6
    for _ in range(_NEWTON_STEPS):
        predicted = _logistic(features @ theta)
        gradient = features.T @ (weights * (labels - predicted)) - penalty * theta
        curvature = weights * np.maximum(predicted * (1 - predicted), 1e-4)
        hessian = (features * curvature[:, None]).T @ features + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        theta += step / max(1.0, float(np.abs(step).max()) / 4.0)
        if np.abs(step).max() < 1e-5:
            break
    return theta


def predictions(
    records: Records, prompts: Integers, weights: Floats, columns: Sequence[str]
) -> Floats:
    """``[n]`` P(accept) of each token, from models that were fitted to other prompts.

    Args:
        records: drafted tokens.
        prompts: ``[n]`` prompt of each token.
        weights: ``[n]`` probability that each token is reached.
        columns: the signals. The acceptance itself is returned as it is.
    """
    labels = np.asarray(records.acceptance, dtype=np.float64)
    if "acceptance" in columns:
        return np.clip(labels, LOWEST, HIGHEST)
    found = np.empty(len(records))
    for known, held_out in folds(prompts):
        part = records.take(known)
        basis = Basis(part, columns)
        features = basis.features(part)
        theta = fitted(features, labels[known], weights[known], _RIDGE)
        found[held_out] = _logistic(basis.features(records.take(held_out)) @ theta)
    return np.clip(found, LOWEST, HIGHEST)


def base_rates(labels: Floats, prompts: Integers, weights: Floats) -> Floats:
    """``[n]`` mean acceptance over other prompts, which knows no signal and no position."""
    found = np.empty(len(labels))
    for known, held_out in folds(prompts):
        found[held_out] = np.average(labels[known], weights=weights[known])
    return np.clip(found, LOWEST, HIGHEST)


def code_length(predicted: Floats, labels: Floats) -> Floats:
    """``[n]`` expected −log₂ P̂(X) in bits, where X is 1 with probability ``labels``."""
    bits: Floats = -(labels * np.log2(predicted) + (1 - labels) * np.log2(1 - predicted))
    return bits


def mean_over_prompts(values: Floats, weights: Floats, prompts: Integers) -> Estimate:
    """Weighted mean of ``[n]`` values, with the standard error of the ratio over prompts."""
    _, place = np.unique(prompts, return_inverse=True)
    sums = np.bincount(place, weights * values)
    sizes = np.bincount(place, weights)
    mean = float(sums.sum() / sizes.sum())
    count = len(sums)
    residual = sums - mean * sizes
    error = np.sqrt(count / (count - 1) * (residual**2).sum()) / sizes.sum()
    return Estimate(mean, float(error))


def _logistic(log_odds: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(log_odds, -30.0, 30.0)))
    return result
