"""Speculative Verification by predictable cuts, which do not depend on the token they cut."""

from __future__ import annotations

import numpy as np

from draftwise.core.types import CompanionScores, Draft, Outcome, Plan
from draftwise.core.types import StepTimes as MeasuredTimes
from draftwise.estimators.combined import Inputs
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import PolicyContext
from draftwise.policies.filtering import Floats
from draftwise.policies.price import reached
from draftwise.policies.sv import SpeculativeVerification


class PredictableVerification(SpeculativeVerification):
    """Selects positions by their own S and by S, A and q(x) of the tokens before them.

    Token i is verified if Π_{j<i} P_j · P̄_i ≥ c with P̄_i = P(accept | S_i, H_i, history, i). P̄_i
    does not depend on the token drawn at i. So q′ = 0 at the cut, and no filter is needed. Use this
    policy in engines that cannot draw the bonus token from max(p − q′, 0).
    """

    name = "sv-predictable"
    summary = "selects each position by S without its token, needs no filtered proposal"
    source = "Speculative Verification, made lossless by predictable cuts"
    filters = False

    def __init__(self, context: PolicyContext) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model is required.
        """
        super().__init__(context)
        self.predictable = ModelPair.of(Inputs.PREDICTABLE, context.parameters)

    def _keep(
        self, draft: Draft, companion_scores: CompanionScores, expected: Floats, thresholds: Floats
    ) -> Plan:
        """Cut each request before the first position that costs more than it gains."""
        drafted = self._drafted(draft)
        rows, places = np.nonzero(drafted)
        signals = self._signals_of(draft, companion_scores, rows, places)
        next_acceptance = np.zeros(draft.tokens.shape)
        next_acceptance[rows, places] = self.predictable.predict(signals, self._greedy[rows])
        before = reached(np.where(drafted, expected, 0.0).cumprod(axis=1))
        is_verified = (before * next_acceptance >= thresholds[:, None]) & drafted
        # Copied tokens were selected before.
        copied = ~self._choice.by_model
        is_verified[copied] = np.arange(drafted.shape[1]) < np.asarray(draft.lengths)[copied, None]
        kept = np.cumprod(is_verified, axis=1).sum(axis=1).astype(int).tolist()
        if draft.probs is not None:
            for row, length in enumerate(kept):
                draft.probs[row, length:] = 0.0
        return Plan(draft.tokens, tuple(kept), draft.probs)

    def observe(self, outcome: Outcome, times: MeasuredTimes) -> None:
        """Update all acceptance models from the step."""
        super().observe(outcome, times)
        known = self._known_tokens(outcome)
        if known is not None:
            self.predictable.observe(*known)
