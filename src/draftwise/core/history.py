"""How a request's recent tokens fared."""

from __future__ import annotations

from collections.abc import Sequence

# Acceptance of a request of which nothing is known, and the weight of each new token.
_FIRST_GUESS = 0.6
_WEIGHT = 0.1


class AcceptanceHistory:
    """Mean acceptance probability of a request's recent tokens, with exponential forgetting.

    Attributes:
        mean: 0 … 1.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.mean = _FIRST_GUESS

    def learn(self, acceptance: Sequence[float]) -> None:
        """Take note of the acceptance probabilities of a step's verified tokens.

        A token counts as far as those before it were likely to be kept.
        """
        reached = 1.0
        for probability in acceptance:
            self.mean += _WEIGHT * reached * (probability - self.mean)
            reached *= probability
