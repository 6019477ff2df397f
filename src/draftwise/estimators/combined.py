"""P(accept) from all signals together: a logistic model that goes on learning.

The log-odds of acceptance are a polynomial in the signals, quadratic in each and with the products
that matter: see :data:`FORMULAS`. What depends on the token drawn enters as log q(x) and A(x)
alone, so that the same formula is evaluated for every token of the vocabulary at the cost of a few
elementwise operations: that makes it usable for filtered proposals.

It is fitted to soft labels (the acceptance probability itself, not the coin that was thrown) by
Newton's method, weighted by the probability that a token is reached, and follows a changing
workload by a recursive Newton step with exponential forgetting and a pull to where it started.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.estimators.calibration import RunningCalibration
from draftwise.estimators.polynomial import (
    LARGEST_ENTROPY,
    LAST_POSITION,
    SMALLEST_TOKEN_PROB,
    Polynomial,
    Variable,
    variables_of,
)
from draftwise.estimators.records import Records

Floats = NDArray[np.float64]

LOWEST, HIGHEST = 0.01, 0.995

# Observed tokens after which an older one counts half.
_HALF_LIFE = 1400.0
_RIDGE = 3.0


class Inputs(Enum):
    """Which signals a model sees."""

    FREE = "free"  # H, q(x), history, position: no companion
    COMBINED = "combined"  # these with S and A
    PREDICTABLE = "predictable"  # H, S, history, position: nothing of the token drawn


_L, _H, _S, _A = Variable.LOG_TOKEN_PROB, Variable.ENTROPY, Variable.OVERLAP, Variable.AGREEMENT
_OF_THE_DRAFT = ((), (_L,), (_L, _L), (_H,), (_H, _H), (_H, _L))
_OF_THE_REQUEST = ((Variable.HISTORY,), (Variable.PLACE,))
FORMULAS = {
    Inputs.FREE: Polynomial(*_OF_THE_DRAFT, *_OF_THE_REQUEST),
    Inputs.COMBINED: Polynomial(
        *(*_OF_THE_DRAFT, *_OF_THE_REQUEST),
        *((_S,), (_A,), (_S, _S), (_A, _A), (_S, _A), (_A, _L), (_S, _H)),
    ),
    Inputs.PREDICTABLE: Polynomial(
        *((), (_H,), (_H, _H), (_S,), (_S, _S), (_S, _H)), *_OF_THE_REQUEST
    ),
}

# Where a model begins that has seen nothing: fits to the bundled family at temperature 1, of use
# for any pair that is distilled or trained alike; replaced by a profile, outgrown online.
_START = {
    Inputs.FREE: (2.17, 0.61, 0.03, -0.57, 0.04, -0.06, 0.77, 0.15),
    Inputs.COMBINED: (
        *(1.09, 0.65, 0.03, -0.30, 0.02, -0.05, 0.53, 0.11),
        *(-0.19, 0.64, 0.79, -0.36, 0.78, -0.06, -0.05),
    ),
    Inputs.PREDICTABLE: (1.2, -0.50, 0.02, 0.5, 0.11, 0.1, 0.5, 0.0),
}


@dataclass(frozen=True)
class Signals:
    """Signals of some drafted tokens, each ``[n]`` float64.

    Attributes:
        token_prob: q(x).
        entropy: H(q) in nats.
        history: the request's recent mean acceptance.
        position: in the draft, from 0.
        overlap: S; 0 without companion.
        agreement: A; 0 without companion.
    """

    token_prob: Floats
    entropy: Floats
    history: Floats
    position: Floats
    overlap: Floats
    agreement: Floats

    @classmethod
    def of(cls, records: Records) -> Signals:
        """The signals of recorded tokens."""
        columns = (
            records.token_prob,
            records.entropy,
            records.history,
            records.position,
            records.overlap,
            records.agreement,
        )
        return cls(*(np.asarray(column, dtype=np.float64) for column in columns))

    def variables(self) -> Floats:
        """``[variables, n]`` for a :class:`Polynomial`."""
        return variables_of(
            *(self.token_prob, self.entropy, self.history),
            *(self.position, self.overlap, self.agreement),
        )


class SignalModel:
    """Log-odds of acceptance as a polynomial of the signals.

    Attributes:
        inputs: which signals it sees.
        formula: the polynomial.
        weights: ``[features]`` of the polynomial.
    """

    def __init__(
        self, inputs: Inputs, weights: Floats | None = None, strength: float = 1.0
    ) -> None:
        """Begin from given weights.

        Args:
            inputs: which signals.
            weights: ``[features]``; ``None`` for the general start.
            strength: how much evidence the start is worth; a profile's is worth more than a guess.
        """
        self.inputs, self.formula = inputs, FORMULAS[inputs]
        start = np.array(_START[inputs] if weights is None else weights, dtype=np.float64)
        if start.shape != (len(_START[inputs]),):
            raise ValueError(f"{inputs.value} needs {len(_START[inputs])} weights")
        self._start = start
        self.weights = start.copy()
        self._pull = np.eye(len(start)) * 5.0 * strength
        self._precision = self._pull.copy()
        self._calibration = RunningCalibration(_HALF_LIFE)

    @classmethod
    def fit(cls, records: Records, inputs: Inputs) -> SignalModel:
        """Fit to recorded tokens (soft labels, weights: the probability that each is reached)."""
        model = cls(inputs, strength=1.0)
        features = model.formula.features(Signals.of(records).variables()).T
        labels = np.asarray(records.acceptance, dtype=np.float64)
        weights = np.asarray(records.reached(), dtype=np.float64)
        theta = model._start.copy()
        for _ in range(50):
            predicted = _logistic(features @ theta)
            gradient = features.T @ (weights * (labels - predicted)) - _RIDGE * (
                theta - model._start
            )
            curvature = weights * predicted * (1 - predicted)
            hessian = (features * curvature[:, None]).T @ features + _RIDGE * np.eye(len(theta))
            step = np.linalg.solve(hessian, gradient)
            theta += step
            if np.abs(step).max() < 1e-8:
                break
        return cls(inputs, theta, strength=40.0)

    def predict(self, signals: Signals) -> Floats:
        """``[n]`` probabilities that the tokens are accepted."""
        log_odds = self.weights @ self.formula.features(signals.variables())
        return np.clip(_logistic(log_odds), LOWEST, HIGHEST)

    def observe(self, signals: Signals, acceptance: Floats, weights: Floats) -> None:
        """Learn from tokens that the target has verified.

        Args:
            signals: of ``n`` tokens.
            acceptance: ``[n]`` their acceptance probabilities.
            weights: ``[n]`` probability that each was reached.
        """
        if not len(acceptance):
            return
        features = self.formula.features(signals.variables()).T
        predicted = _logistic(features @ self.weights)
        self._calibration.observe(np.clip(predicted, LOWEST, HIGHEST), acceptance, weights)
        kept = 0.5 ** (float(weights.sum()) / _HALF_LIFE)
        curvature = weights * np.maximum(predicted * (1 - predicted), 0.02)
        self._precision = kept * self._precision + (1 - kept) * self._pull
        self._precision += (features * curvature[:, None]).T @ features
        gradient = features.T @ (weights * (acceptance - predicted))
        gradient += (1 - kept) * self._pull @ (self._start - self.weights)
        self.weights += np.linalg.solve(self._precision, gradient)

    def log_odds_over_vocabulary(
        self, q: Tensor, entropy: Tensor, history: Tensor, position: Tensor, c: Tensor | None
    ) -> Tensor:
        """What :meth:`predict` would say of every token, as log-odds.

        Args:
            q: ``[rows, vocab]`` the draft's distribution.
            entropy: ``[rows]`` H of them.
            history: ``[rows]``.
            position: ``[rows]`` in the draft.
            c: ``[rows, vocab]`` the companion's draft_probs; ``None`` if it sees none.
        """
        if self.inputs is Inputs.PREDICTABLE:
            raise ValueError("a predictable model knows nothing of the token")
        s = torch.zeros_like(entropy) if c is None else torch.minimum(q, c).sum(dim=1)
        place = position.clamp(max=LAST_POSITION).to(entropy.dtype) / LAST_POSITION
        by_name = {
            Variable.ENTROPY: entropy.clamp(max=LARGEST_ENTROPY),
            Variable.HISTORY: history,
            Variable.PLACE: place,
            Variable.OVERLAP: s,
        }
        one = torch.ones_like(entropy)
        variables = torch.stack([by_name.get(each, one) for each in Variable])
        log_q = q.clamp(min=SMALLEST_TOKEN_PROB).log_()
        a = None if c is None else (c / q.clamp(min=1e-30)).clamp_(max=1.0)
        return self.formula.over_vocabulary(self.weights, variables, log_q, a)

    def range_of_likely(
        self, entropy: Floats, history: Floats, position: Floats, needed: Floats
    ) -> tuple[Floats, Floats]:
        """Which q(x) make a token likely enough: all from one value to another.

        Within a position the log-odds are quadratic in log q(x). Where two ranges are likely
        enough, the upper one is returned.

        Args:
            entropy: ``[rows, places]`` H of the positions.
            history: ``[rows, 1]``.
            position: ``[places]`` in the draft.
            needed: ``[rows, places]`` probability of acceptance, above 0 and below 1.

        Returns:
            ``[rows, places]`` least and largest q(x); the least is infinite where no token is
            likely enough.
        """
        if self.inputs is not Inputs.FREE:
            raise ValueError("what else the model sees of a token is no function of q(x)")
        others = variables_of(1.0, entropy, history, position)
        level, slope, bend = self.formula.by_token_prob(self.weights, others)
        first, last = _not_negative(bend, slope, level - np.log(needed / (1 - needed)))
        lowest = math.log(SMALLEST_TOKEN_PROB)  # whatever lies below counts as this
        none = (first > last) | (last < lowest) | (first > 0)
        least = np.where(first <= lowest, 0.0, np.exp(np.minimum(first, 0.0)))
        most = np.where(last >= 0, np.inf, np.exp(np.minimum(last, 0.0)))
        return np.where(none, np.inf, least), most

    def to_tensors(self) -> dict[str, Tensor]:
        """For a file."""
        return {"weights": torch.from_numpy(self.weights.copy())}

    @classmethod
    def from_tensors(cls, inputs: Inputs, tensors: dict[str, Tensor]) -> SignalModel:
        """The inverse of :meth:`to_tensors`; what was fitted is worth more than a guess."""
        return cls(inputs, tensors["weights"].numpy().astype(np.float64), strength=40.0)

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of recent tokens."""
        return self._calibration.error

    @property
    def calibration_weight(self) -> float:
        """How many tokens :attr:`calibration_error` is about, older ones counting less."""
        return self._calibration.weight


def _not_negative(bend: float, slope: Floats, level: Floats) -> tuple[Floats, Floats]:
    """Where bend·l² + slope·l + level ≥ 0 for l ≤ 0: from and to, the upper range of two."""
    if abs(bend) < 1e-9:
        with np.errstate(divide="ignore", invalid="ignore"):
            zero = -level / slope
        flat = np.where(level >= 0, -np.inf, np.inf)
        first = np.where(slope > 0, zero, np.where(slope < 0, -np.inf, flat))
        return first, np.where(slope < 0, zero, np.inf)
    inside = slope * slope - (4 * bend) * level
    none = inside < 0
    root = np.sqrt(np.maximum(inside, 0.0))
    one, other = (-slope - root) / (2 * bend), (root - slope) / (2 * bend)
    if bend < 0:
        return np.where(none, np.inf, other), np.where(none, -np.inf, one)
    # Beyond the upper zero, or if that lies above certainty up to the lower one.
    first = np.where(none | (other > 0), -np.inf, other)
    return first, np.where(none | (other <= 0), np.inf, one)


def _logistic(log_odds: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(log_odds, -30.0, 30.0)))
    return result
