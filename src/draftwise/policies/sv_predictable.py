"""Speculative Verification by predictable cuts, which do not depend on the token they cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.estimators.combined import Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import PolicyContext
from draftwise.policies.priced import Floats
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

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model is required.
            options: fields of :class:`draftwise.policies.pricing_options.PricingOptions`.
        """
        super().__init__(context, **options)
        self.predictable = ModelPair.of(Inputs.PREDICTABLE, context.parameters)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Cut where the next position costs more than it gains. Without scores, verify all."""
        if companion_scores is not None or draft.parents is not None:
            return super().select(draft, companion_scores)
        self._draft, self._companion_scores = draft, None
        return Plan(draft.tokens, draft.lengths, draft.probs)

    def select_scored(
        self, draft: Draft, companion_scores: CompanionScores, expected: Floats
    ) -> Plan:
        """Cut each request before the first position that costs more than it gains."""
        lengths = np.asarray(draft.lengths)
        drafted = np.arange(draft.tokens.shape[1]) < lengths[:, None]
        rows, places = np.nonzero(drafted)
        signals = self.signals_of(draft, companion_scores, rows, places)
        next_acceptance = np.zeros(draft.tokens.shape)
        next_acceptance[rows, places] = self.predictable.predict(signals, self._greedy[rows])
        before = np.cumprod(np.where(drafted, expected, 0.0), axis=1)
        before = np.concatenate([np.ones((len(lengths), 1)), before[:, :-1]], axis=1)
        is_verified = (before * next_acceptance >= self.verification_threshold) & drafted
        # What is certain to be drafted was chosen before, and is verified.
        is_verified[self._is_offered] = drafted[self._is_offered]
        if self._explorer is not None:
            is_verified[self._explorer] = drafted[self._explorer]
        kept = np.cumprod(is_verified, axis=1).sum(axis=1).astype(int).tolist()
        if draft.probs is not None:
            for row, length in enumerate(kept):
                draft.probs[row, length:] = 0.0
        return Plan(draft.tokens, tuple(kept), draft.probs)

    def learn(
        self,
        signals: Signals,
        greedy: NDArray[np.bool_],
        acceptance: Floats,
        reach_probability: Floats,
    ) -> None:
        """Update all acceptance models from the step."""
        super().learn(signals, greedy, acceptance, reach_probability)
        if self._companion_scores is not None:
            self.predictable.observe(signals, greedy, acceptance, reach_probability)
