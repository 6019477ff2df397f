"""Speculative Verification by predictable cuts: a position is judged before its token is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import Draft, Judgement, Plan
from draftwise.estimators.combined import Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import PolicyContext
from draftwise.policies.priced import Floats
from draftwise.policies.sv import SpeculativeVerification


class PredictableVerification(SpeculativeVerification):
    """Selection by S of the position itself and by S, A, q(x) of the tokens before it.

    Token i is verified if Π_{j<i} P_j · P̄_i ≥ c with P̄_i = P(accept | S_i, H_i, history, i), which
    knows nothing of the token drawn at i: then q′ = 0 at the cut and no filter is needed. This is
    the form for engines whose bonus position cannot be drawn from max(p − q′, 0).
    """

    name = "sv-predictable"
    summary = "judges each position by S before its token, needs no filtered proposal"
    source = "Speculative Verification, made lossless by predictable cuts"
    filters = False

    def __init__(self, context: PolicyContext, explore_every: int = 64) -> None:
        """Set up.

        Args:
            context: with a latency model.
            explore_every: steps between two explorations.
        """
        super().__init__(context, explore_every)
        self.predictable = ModelPair.of(Inputs.PREDICTABLE, context.parameters)

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """Cut where the next position does not pay; without judgement verify the whole draft."""
        if judgement is not None:
            return super().select(draft, judgement)
        self._draft, self._judgement = draft, None
        return Plan(draft.tokens, draft.lengths, draft.probs)

    def plan_judged(self, draft: Draft, judgement: Judgement, expected: Floats) -> Plan:
        """Cut each request before the first position that does not pay."""
        lengths = np.asarray(draft.lengths)
        drafted = np.arange(draft.tokens.shape[1]) < lengths[:, None]
        rows, places = np.nonzero(drafted)
        signals = self.signals_of(draft, judgement, rows, places)
        outlook = np.zeros(draft.tokens.shape)
        outlook[rows, places] = self.predictable.predict(signals, self._greedy[rows])
        before = np.cumprod(np.where(drafted, expected, 0.0), axis=1)
        before = np.concatenate([np.ones((len(lengths), 1)), before[:, :-1]], axis=1)
        pays = (before * outlook >= self.judged_threshold) & drafted
        pays[self._explorers] = drafted[self._explorers]
        kept = np.cumprod(pays, axis=1).sum(axis=1).astype(int).tolist()
        if draft.probs is not None:
            for row, length in enumerate(kept):
                draft.probs[row, length:] = 0.0
        return Plan(draft.tokens, tuple(kept), draft.probs)

    def learn(
        self, signals: Signals, greedy: NDArray[np.bool_], acceptance: Floats, reached: Floats
    ) -> None:
        """Follow the workload with every estimate there is."""
        super().learn(signals, greedy, acceptance, reached)
        if self._judgement is not None:
            self.predictable.observe(signals, greedy, acceptance, reached)
