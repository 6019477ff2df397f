"""Drafting and verification priced together, from what the draft knows of itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import CompanionScores, Draft, DraftRule, Plan
from draftwise.estimators.combined import FORMULAS, HIGHEST, LOWEST, Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.estimators.polynomial import LARGEST_ENTROPY, LAST_POSITION, SMALLEST_TOKEN_PROB
from draftwise.policies.base import DraftPosition, PolicyContext, Signal
from draftwise.policies.filtering import LEAST_NEEDED, NEXT_TO_NOTHING, keep_noted
from draftwise.policies.priced import Floats, PricedPolicy

# Tokens; the error of fewer is mostly chance.
_ENOUGH_TO_JUDGE = 30


class Adaptive(PricedPolicy):
    """Online estimate of acceptance from free signals, and prices.

    With P_i = P(accept | H_i, q_i(x_i), history, i) and w_i = Π_{j≤i} P_j, token i is verified if
    w_i ≥ c (as a filtered proposal), and another one is drafted under the same condition. c, or in
    its place a draft length for all requests, down to no speculation at all, is the operating point
    with the best expected goodput at the batch size: see :mod:`draftwise.policies.pricing`.
    """

    name = "adaptive"
    summary = "drafts and verifies what pays, from the draft's own signals"
    source = "this project"
    signals = frozenset(
        {
            Signal.ENTROPY,
            Signal.TOKEN_PROBABILITY,
            Signal.HISTORY,
            Signal.POSITION,
            Signal.LOAD,
        }
    )
    filters = True

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up.

        Args:
            context: with a latency model; a profile, if there is one, gives the first estimate.
            options: fields of :class:`draftwise.policies.pricing.PricingOptions`.
        """
        super().__init__(context, **options)
        self.models = ModelPair.of(Inputs.FREE, context.parameters)

    def expect(self, position: DraftPosition) -> Floats:
        """P of the token just drafted."""
        assert position.token_probs is not None
        assert position.entropy is not None
        active = np.asarray(position.requests)
        nothing = np.zeros(len(active))
        signals = Signals(
            token_prob=position.token_probs.cpu().double().numpy(),
            entropy=position.entropy.cpu().double().numpy(),
            history=self._history[active],
            position=np.full(len(active), float(position.index)),
            overlap=nothing,
            agreement=nothing,
        )
        return self.models.predict(signals, self._greedy[active])

    def draft_rule(self) -> DraftRule | None:
        """The same as numbers."""
        if not self._watches:
            return None
        return DraftRule(
            weights=np.stack([self.models[greedy].weights for greedy in (False, True)]),
            pairs=FORMULAS[Inputs.FREE].pairs,
            smallest_token_prob=SMALLEST_TOKEN_PROB,
            largest_entropy=LARGEST_ENTROPY,
            last_position=LAST_POSITION,
            bounds=(LOWEST, HIGHEST),
            greedy=self._greedy,
            history=self._history,
            thresholds=self._thresholds(self._price.point.threshold),
            next_to_nothing=NEXT_TO_NOTHING,
            least_needed=LEAST_NEEDED,
            notes=self._notes,
        )

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Verify what pays."""
        self._draft, self._companion_scores = draft, None
        threshold = self._price.point.threshold
        if threshold == 0 or not any(draft.lengths):
            return Plan(draft.tokens, draft.lengths, draft.probs)
        if self._notes.are_about(draft):
            return keep_noted(draft, self._notes, self._greedy)
        return self.keep_in_range(draft, self._expected, self.models, threshold)

    def learn(
        self, signals: Signals, greedy: NDArray[np.bool_], acceptance: Floats, reached: Floats
    ) -> None:
        """Follow the workload."""
        self.models.observe(signals, greedy, acceptance, reached)

    @property
    def calibration_error(self) -> float | None:
        """Of the estimate from the draft's own signals."""
        return calibration_error(self.models)


def calibration_error(models: ModelPair) -> float | None:
    """Mean over the tokens of sampled and greedy requests; ``None`` while there are few."""
    weights = [model.calibration_weight for model in models.values()]
    if sum(weights) < _ENOUGH_TO_JUDGE:
        return None
    errors = [model.calibration_error for model in models.values()]
    return float(np.average(errors, weights=weights))
