"""Running acceptance statistics of one request."""

from __future__ import annotations

from collections.abc import Sequence

# Initial estimate for a request without verified tokens, and the weight of each new token.
_INITIAL_MEAN = 0.6
_TOKEN_WEIGHT = 0.1


class AcceptanceHistory:
    """Mean acceptance probability of a request's recent tokens, with exponential forgetting.

    Attributes:
        mean: running mean, 0 … 1.
    """

    def __init__(self) -> None:
        """Start from the initial estimate."""
        self.mean = _INITIAL_MEAN

    def learn(self, acceptance: Sequence[float]) -> None:
        """Update the mean with the acceptance probabilities of a step's verified tokens.

        Each token is weighted by the probability that all tokens before it were accepted.

        Args:
            acceptance: acceptance probability of each verified token, in draft order.
        """
        reach_probability = 1.0
        for probability in acceptance:
            self.mean += _TOKEN_WEIGHT * reach_probability * (probability - self.mean)
            reach_probability *= probability
