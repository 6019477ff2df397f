"""SpecDec++: stop once it is likely that something drafted will be rejected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwise.policies.base import DraftPosition, PolicyContext, RequestState
from draftwise.policies.learned import LearnedStop
from draftwise.policies.options import number_option
from draftwise.policies.stopping import RunningProduct


class SpecDecPlusPlus(LearnedStop):
    """Stop where P(some drafted token is rejected) = 1 − Π_{j≤i} P_j > threshold.

    Huang et al. 2024, section 3: as a Markov decision process the optimal draft length has this
    form. P_j comes from an acceptance head trained with rejections weighted up; theirs reads the
    draft's last hidden state, here it is an
    :class:`~draftwise.estimators.classifier.AcceptanceHead` over the draft's signals.
    """

    name = "specdec++"
    summary = "stops when a trained head expects that some drafted token is rejected"
    source = "Huang et al. 2024, SpecDec++: Boosting Speculative Decoding via Adaptive Lengths"

    def __init__(self, context: PolicyContext, threshold: float = 0.7) -> None:
        """Set up.

        Args:
            context: what every policy gets, a profile included.
            threshold: largest probability of a rejection with which drafting goes on, 0 … 1.
        """
        super().__init__(context)
        self._threshold = number_option("threshold", threshold, 0.0, 1.0)
        self._all_accepted = RunningProduct()

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for everybody, as far as there is room."""
        self._all_accepted.begin(len(requests))
        return super().draft_lengths(requests)

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """1 − Π P_j ≤ threshold."""
        return 1 - self._all_accepted.times(position, self.p_accept(position)) <= self._threshold
