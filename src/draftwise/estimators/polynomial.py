"""The polynomial in a token's signals that gives the log-odds of its acceptance.

Every feature is the product of two variables. A :class:`Polynomial` is a table of such pairs. The
formula is defined by this table only. Predictions, fits and whole vocabularies evaluate the same
table.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Values = TypeVar("Values", Floats, Tensor)

# Signals beyond these limits are clipped to them.
SMALLEST_TOKEN_PROB = 1e-4
LARGEST_ENTROPY = 6.0
LAST_POSITION = 3


class Variable(IntEnum):
    """The variables whose products are features."""

    ONE = 0
    LOG_TOKEN_PROB = 1  # log max(q(x), smallest)
    ENTROPY = 2  # min(H, largest)
    HISTORY = 3
    PLACE = 4  # min(position, last) / last
    OVERLAP = 5  # S
    AGREEMENT = 6  # A


class Polynomial:
    """Products of pairs of variables, one per feature.

    Attributes:
        pairs: ``[features, 2]`` int64, the :class:`Variable` of both factors.
    """

    def __init__(self, *features: tuple[Variable, ...]) -> None:
        """Create a polynomial from the factors of each feature: two, one, or none for 1."""
        self.pairs: Integers = np.array(
            [(*each, Variable.ONE, Variable.ONE)[:2] for each in features], dtype=np.int64
        )
        self._first, self._second = self.pairs.T.copy()

    def __len__(self) -> int:
        """Number of features."""
        return len(self.pairs)

    def features(self, variables: Values) -> Values:
        """``[features, ...]`` from ``[variables, ...]``."""
        products: Values = variables[self._first] * variables[self._second]
        return products

    def over_vocabulary(
        self, weights: Floats, variables: Tensor, log_q: Tensor, agreement: Tensor
    ) -> Tensor:
        """``[rows, vocab]`` the polynomial for all tokens, which differ in q(x) and A only.

        Args:
            weights: ``[features]`` weights of the polynomial.
            variables: ``[variables, rows]``; the variables of q(x) and A are 1.
            log_q: ``[rows, vocab]`` l of every token; overwritten.
            agreement: ``[rows, vocab]`` A of every token.
        """
        weighted = self.features(variables) * torch.from_numpy(weights).to(variables)[:, None]
        constant, linear, square, of_a, of_a_and_l, square_of_a = (
            self._groups.to(variables) @ weighted
        ).unsqueeze(2)
        result: Tensor = (log_q * square).add_(linear).mul_(log_q).add_(constant)
        of_agreement = log_q.mul_(of_a_and_l).add_(of_a).addcmul_(agreement, square_of_a)
        return result.add_(of_agreement.mul_(agreement))

    @cached_property
    def _groups(self) -> Tensor:
        """``[6, features]`` 1 if the feature has the powers of l and A that define the group."""
        powers = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2)]
        of_feature = [
            (pair.count(Variable.LOG_TOKEN_PROB), pair.count(Variable.AGREEMENT))
            for pair in self.pairs.tolist()
        ]
        return torch.tensor([[float(each == group) for each in of_feature] for group in powers])


def variables_of(
    token_prob: Floats | float,
    entropy: Floats,
    history: Floats,
    position: Floats,
    overlap: Floats | float = 0.0,
    agreement: Floats | float = 0.0,
) -> Floats:
    """``[variables, ...]`` from signals of equal shape, or of shapes that broadcast."""
    shape = np.broadcast(token_prob, entropy, history, position).shape
    values: Floats = np.empty((len(Variable), *shape))
    values[Variable.ONE] = 1.0
    np.log(np.maximum(token_prob, SMALLEST_TOKEN_PROB), out=values[Variable.LOG_TOKEN_PROB, ...])
    np.minimum(entropy, LARGEST_ENTROPY, out=values[Variable.ENTROPY, ...])
    values[Variable.HISTORY] = history
    values[Variable.PLACE] = np.minimum(position, LAST_POSITION) / LAST_POSITION
    values[Variable.OVERLAP] = overlap
    values[Variable.AGREEMENT] = agreement
    return values
