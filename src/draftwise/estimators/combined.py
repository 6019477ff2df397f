"""P(accept) from several signals, by a logistic model that is updated online.

The log-odds of acceptance are a polynomial in the signals: quadratic in each signal, with selected
products of two signals (see :data:`FORMULAS`). The drawn token enters only through log q(x) and
A(x). So the formula can be evaluated for every token of the vocabulary with a few elementwise
operations, as filtered proposals require.

The model is fitted by Newton's method to soft labels: to the acceptance probability itself, not to
the accept/reject outcome. Each token is weighted by the probability that it is reached. Online, the
model follows a changing workload by a recursive Newton step with exponential forgetting and a
regularisation towards the initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

# Bounds of predicted acceptance probabilities.
LOWEST, HIGHEST = 0.01, 0.995

# Total weight of later tokens after which a token's weight halves.
_HALF_LIFE = 1400.0
# Strength of the ridge regularisation of a fit towards the initial weights.
_RIDGE = 3.0


class Inputs(Enum):
    """The signals that a model uses."""

    FREE = "free"  # H, q(x), history and position; needs no companion
    COMBINED = "combined"  # the same, and S and A
    PREDICTABLE = "predictable"  # H, S, history and position; does not depend on the drawn token


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

# Initial weights without a profile: fits to the bundled model family at temperature 1. They suit
# any pair of models that is distilled or trained in a similar way. Online updates replace them.
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
    """Signals of drafted tokens, each ``[n]`` float64.

    Attributes:
        token_prob: q(x).
        entropy: H(q) in nats.
        history: the request's recent mean acceptance.
        position: position in the draft, from 0.
        overlap: S; 0 without a companion.
        agreement: A; 0 without a companion.
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
        """``[variables, n]`` the variables of a :class:`Polynomial`."""
        return variables_of(
            *(self.token_prob, self.entropy, self.history),
            *(self.position, self.overlap, self.agreement),
        )


class SignalModel:
    """Log-odds of acceptance as a polynomial of the signals.

    Attributes:
        inputs: the signals that the model uses.
        formula: the polynomial.
        weights: ``[features]`` weights of the polynomial.
    """

    def __init__(
        self, inputs: Inputs, weights: Floats | None = None, strength: float = 1.0
    ) -> None:
        """Start from given weights.

        Args:
            inputs: the signals that the model uses.
            weights: ``[features]`` initial weights; ``None`` for the built-in ones.
            strength: weight of the initial weights relative to observations. Weights from a profile
                have a larger strength than built-in ones.

        Raises:
            ValueError: the number of weights does not match the inputs.
        """
        self.inputs, self.formula = inputs, FORMULAS[inputs]
        start = np.array(_START[inputs] if weights is None else weights, dtype=np.float64)
        if start.shape != (len(_START[inputs]),):
            raise ValueError(f"{inputs.value} needs {len(_START[inputs])} weights")
        self._start = start
        self.weights = start.copy()
        self._pull = np.eye(len(start)) * 5.0 * strength
        self._precision = self._pull.copy()

    @classmethod
    def fit(cls, records: Records, inputs: Inputs) -> SignalModel:
        """Fit the model to the acceptance probabilities of recorded tokens.

        Each token is weighted by the probability that it is reached.
        """
        model = cls(inputs, strength=1.0)
        features = model.formula.features(Signals.of(records).variables()).T
        labels = np.asarray(records.acceptance, dtype=np.float64)
        weights = np.asarray(records.reach_probability(), dtype=np.float64)
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
        """``[n]`` estimated acceptance probabilities."""
        log_odds = self.weights @ self.formula.features(signals.variables())
        return np.clip(_logistic(log_odds), LOWEST, HIGHEST)

    def observe(self, signals: Signals, acceptance: Floats, weights: Floats) -> None:
        """Update the model with tokens that the target has verified.

        Args:
            signals: signals of ``n`` tokens.
            acceptance: ``[n]`` acceptance probability of each token.
            weights: ``[n]`` probability that each token is reached.
        """
        if not len(acceptance):
            return
        features = self.formula.features(signals.variables()).T
        predicted = _logistic(features @ self.weights)
        kept = 0.5 ** (float(weights.sum()) / _HALF_LIFE)
        curvature = weights * np.maximum(predicted * (1 - predicted), 0.02)
        self._precision = kept * self._precision + (1 - kept) * self._pull
        self._precision += (features * curvature[:, None]).T @ features
        gradient = features.T @ (weights * (acceptance - predicted))
        gradient += (1 - kept) * self._pull @ (self._start - self.weights)
        self.weights += np.linalg.solve(self._precision, gradient)

    def log_odds_over_vocabulary(
        self, q: Tensor, entropy: Tensor, history: Tensor, position: Tensor, c: Tensor
    ) -> Tensor:
        """The estimate of :meth:`predict` for every token of the vocabulary, as log-odds.

        Args:
            q: ``[rows, vocab]`` the draft's distributions.
            entropy: ``[rows]`` H of the distributions.
            history: ``[rows]`` recent mean acceptance of the requests.
            position: ``[rows]`` positions in the draft.
            c: ``[rows, vocab]`` the companion's distributions.

        Returns:
            ``[rows, vocab]`` log-odds, not clipped.

        Raises:
            ValueError: the model's inputs do not depend on the token.
        """
        if self.inputs is Inputs.PREDICTABLE:
            raise ValueError("a predictable model does not depend on the token")
        place = position.clamp(max=LAST_POSITION).to(entropy.dtype) / LAST_POSITION
        by_name = {
            Variable.ENTROPY: entropy.clamp(max=LARGEST_ENTROPY),
            Variable.HISTORY: history,
            Variable.PLACE: place,
            Variable.OVERLAP: torch.minimum(q, c).sum(dim=1),
        }
        one = torch.ones_like(entropy)
        variables = torch.stack([by_name.get(each, one) for each in Variable])
        log_q = q.clamp(min=SMALLEST_TOKEN_PROB).log_()
        a = (c / q.clamp(min=1e-30)).clamp_(max=1.0)
        return self.formula.over_vocabulary(self.weights, variables, log_q, a)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the weights as named tensors, for a file."""
        return {"weights": torch.from_numpy(self.weights.copy())}

    @classmethod
    def from_tensors(cls, inputs: Inputs, tensors: dict[str, Tensor]) -> SignalModel:
        """The inverse of :meth:`to_tensors`. The weights get the strength of fitted weights.

        Raises:
            KeyError: a tensor is missing.
            ValueError: the number of weights does not match the inputs.
        """
        return cls(inputs, tensors["weights"].numpy().astype(np.float64), strength=40.0)


def _logistic(log_odds: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(log_odds, -30.0, 30.0)))
    return result
