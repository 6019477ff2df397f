"""DISCO: a trained classifier decides after each token whether to continue drafting."""

from __future__ import annotations

from torch import Tensor

from draftwise.policies.base import PolicyContext
from draftwise.policies.inputs import DraftPosition
from draftwise.policies.learned import LearnedStop
from draftwise.policies.options import number_option


class Disco(LearnedStop):
    """Stop after a token that the target is predicted to reject: P(accept) < threshold.

    Mamou et al. 2024, section 3. Their network of two layers gets the draft's distribution, its
    entropy and the position of the token. Here an acceptance head
    (:mod:`draftwise.estimators.classifier`) takes its place, which also gets the acceptance
    history.
    """

    name = "disco"
    summary = "stops after a token that a trained classifier expects to be rejected"
    source = "Mamou et al. 2024, Dynamic Speculation Lookahead Accelerates Speculative Decoding"

    def __init__(self, context: PolicyContext, threshold: float = 0.3) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a profile is required.
            threshold: minimum P(accept) to continue drafting, 0 … 1.
        """
        super().__init__(context)
        self._threshold = number_option("threshold", threshold, 0.0, 1.0)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """P(accept) ≥ threshold."""
        return self.p_accept(position) >= self._threshold
