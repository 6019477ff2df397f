"""Drafting and verification by prices and by acceptance estimates from the draft's own signals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwise.core.rules import DraftRule
from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.estimators.combined import FORMULAS, HIGHEST, LOWEST, Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.estimators.polynomial import LARGEST_ENTROPY, LAST_POSITION, SMALLEST_TOKEN_PROB
from draftwise.policies.base import PolicyContext, Signal
from draftwise.policies.filtering import MIN_REQUIRED, UNFILTERED_LIMIT, keep_by_rule
from draftwise.policies.inputs import DraftPosition
from draftwise.policies.priced import Floats, PricedPolicy

# Minimum weight of the tokens in a calibration error. The error of fewer tokens is mostly noise.
_MIN_CALIBRATION_WEIGHT = 30


class Adaptive(PricedPolicy):
    """Compares an online acceptance estimate from the draft's own signals with prices.

    Let P_i = P(accept | H_i, q_i(x_i), history, i) and w_i = Π_{j≤i} P_j. Another token is drafted
    if w_i ≥ c. Token i is verified under the same condition, as a filtered proposal, or always. The
    policy uses the operating point with the best expected goodput at the batch size. An operating
    point is either a threshold c with one of the two, or a draft length for all requests; length 0
    is no speculation. See :mod:`draftwise.policies.pricing`.
    """

    name = "adaptive"
    summary = "drafts and verifies while this increases goodput, by the draft's own signals"
    source = "this project"
    verifies_trees = True
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
            context: see :class:`PolicyContext`; a latency model is required. The first acceptance
                estimate comes from the profile if there is one.
            options: fields of :class:`draftwise.policies.pricing_options.PricingOptions`.
        """
        super().__init__(context, **options)
        self.models = ModelPair.of(Inputs.FREE, context.parameters)

    def expect(self, position: DraftPosition) -> Floats:
        """``[active]`` P of the token just drafted."""
        assert position.token_probs is not None
        assert position.entropy is not None
        active = np.asarray(position.requests)
        zeros = np.zeros(len(active))
        signals = Signals(
            token_prob=position.token_probs.cpu().double().numpy(),
            entropy=position.entropy.cpu().double().numpy(),
            history=self._history[active],
            position=np.full(len(active), float(position.index)),
            overlap=zeros,
            agreement=zeros,
        )
        return self.models.predict(signals, self._greedy[active])

    def draft_rule(self) -> DraftRule | None:
        """The drafting and verification decisions of this step as numbers."""
        if not self._uses_signals:
            return None
        return DraftRule(
            weights=np.array([self.models[greedy].weights for greedy in (False, True)]),
            pairs=FORMULAS[Inputs.FREE].pairs,
            smallest_token_prob=SMALLEST_TOKEN_PROB,
            largest_entropy=LARGEST_ENTROPY,
            last_position=LAST_POSITION,
            bounds=(LOWEST, HIGHEST),
            greedy=self._greedy,
            history=self._history,
            thresholds=self._thresholds(self._price.point.threshold),
            unfiltered_limit=UNFILTERED_LIMIT,
            min_required=MIN_REQUIRED,
            results=self._rule_results,
        )

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the tokens whose probability to be accepted reaches the threshold."""
        self._draft, self._companion_scores = draft, None
        threshold = self.filter_threshold
        if threshold == 0 or not any(draft.lengths):
            return Plan(draft.tokens, draft.lengths, draft.probs)
        if self._rule_results.cover(draft):
            return keep_by_rule(draft, self._rule_results, self._greedy)
        return self.keep_in_range(draft, self._expected, self.models, threshold)

    def learn(
        self,
        signals: Signals,
        greedy: NDArray[np.bool_],
        acceptance: Floats,
        reach_probability: Floats,
    ) -> None:
        """Update the acceptance models."""
        self.models.observe(signals, greedy, acceptance, reach_probability)

    @property
    def calibration_error(self) -> float | None:
        """Recent error of the estimate from the draft's own signals; ``None`` with few tokens."""
        return calibration_error(self.models)


def calibration_error(models: ModelPair) -> float | None:
    """Mean calibration error over the tokens of sampled and greedy requests.

    ``None`` while there are too few tokens.
    """
    weights = [model.calibration_weight for model in models.values()]
    if sum(weights) < _MIN_CALIBRATION_WEIGHT:
        return None
    errors = [model.calibration_error for model in models.values()]
    return float(np.average(errors, weights=weights))
