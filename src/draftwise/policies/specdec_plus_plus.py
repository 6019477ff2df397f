"""SpecDec++: stops drafting when a rejection of any drafted token becomes likely."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwise.policies.base import DraftPlan, PolicyContext
from draftwise.policies.inputs import DraftPosition, RequestState
from draftwise.policies.learned import LearnedStop
from draftwise.policies.options import number_option
from draftwise.policies.stopping import RunningProduct


class SpecDecPlusPlus(LearnedStop):
    """Stop where P(some drafted token is rejected) = 1 − Π_{j≤i} P_j > threshold.

    Huang et al. 2024, section 3. They show that the optimal stopping rule of the corresponding
    Markov decision process is a threshold. P_j comes from an acceptance head trained with a higher
    weight on rejections. Their head reads the draft's last hidden state. Here it is an
    :class:`~draftwise.estimators.classifier.AcceptanceHead` over the draft's signals.
    """

    name = "specdec++"
    summary = "stops when a trained head expects that some drafted token is rejected"
    source = "Huang et al. 2024, SpecDec++: Boosting Speculative Decoding via Adaptive Lengths"

    def __init__(self, context: PolicyContext, threshold: float = 0.7) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a profile is required.
            threshold: maximum probability of a rejection to continue drafting, 0 … 1.
        """
        super().__init__(context)
        self._threshold = number_option("threshold", threshold, 0.0, 1.0)
        self._all_accepted = RunningProduct()

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request."""
        self._all_accepted.begin(len(requests))
        return super().plan_drafts(requests)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """1 − Π P_j ≤ threshold."""
        return 1 - self._all_accepted.times(position, self.p_accept(position)) <= self._threshold
