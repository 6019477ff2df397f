"""Lossless Speculative Verification: a companion scores drafts while this increases goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.estimators.combined import Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.adaptive import Adaptive, calibration_error
from draftwise.policies.base import DraftChoice, PolicyContext, Signal
from draftwise.policies.inputs import RequestState
from draftwise.policies.priced import Floats
from draftwise.policies.scored_trees import ScoredTrees

# Number of scored steps at a batch size before the mean net gain decides whether the companion
# scores. The mean of fewer steps is mostly noise.
_NUM_INITIAL_TRIALS = 6
# Number of steps without the companion after its mean net gain was not positive: the first and the
# longest pause. Pauses double, so that repeated trials of a companion without benefit cost little.
_MIN_PAUSE, _MAX_PAUSE = 16, 512
# While the mean net gain is positive, one step in this many runs without the companion. Its time
# shows how much time the companion adds to the other steps.
_UNSCORED_EVERY = 8
# Minimum weight of a new net gain in the running mean, so that the mean follows the workload.
_MIN_GAIN_WEIGHT = 0.1
# Minimum total weight of the timed steps with the companion, and of those without it, before their
# times are compared. The times of fewer steps are mostly noise.
_MIN_TIMED_STEPS = 12
# Weight of a timed step relative to the step after it, so that the means follow the machine.
_TIME_FORGETTING = 0.99
# A time ratio above this multiple of the mean is clipped, because a pause of the machine is not a
# property of the companion.
_MAX_RATIO_TO_MEAN = 3.0
# Weight of a step in the mean number of nodes that a step verifies.
_NODES_WEIGHT = 0.1


class _TreesWorth(NamedTuple):
    """What tokens and time were worth in a step with scored trees.

    Attributes:
        price: what a verified node costs, in tokens.
        goodput: tokens per second.
        num_read: number of nodes that the companion read.
    """

    price: float
    goodput: float
    num_read: int


class _MeanRatio:
    """Mean ratio of observed to expected step time, with forgetting; 1 without observations."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.value = 1.0

    def observe(self, ratio: float) -> None:
        """Add the ratio of one step."""
        if self.weight >= 1:
            ratio = min(ratio, _MAX_RATIO_TO_MEAN * self.value)
        self.weight = _TIME_FORGETTING * self.weight + 1
        self.value += (ratio - self.value) / self.weight


class _CompanionValue:
    """Estimates at one batch size whether the companion's scores are worth the cost of its pass.

    The companion scores a few steps as initial trials. While its mean net gain is positive, it then
    scores all steps except a few. Otherwise it pauses, and one more trial follows each pause. The
    pauses double until the mean net gain is positive again.

    Attributes:
        net_gain: mean net gain of a scored step, in tokens: the tokens that the scores gain minus
            their cost.
    """

    def __init__(self) -> None:
        self.net_gain = 0.0
        self._count = 0
        self._pause = _MIN_PAUSE
        self._skip_steps = 0
        self._steps_in_use = 0
        self._times = {False: _MeanRatio(), True: _MeanRatio()}

    def scores_step(self) -> bool:
        """Whether the companion scores this step. Call it once per step."""
        if self._skip_steps:
            self._skip_steps -= 1
            return False
        if self._count < _NUM_INITIAL_TRIALS or self.net_gain <= 0:
            return True
        self._steps_in_use += 1
        return self._steps_in_use % _UNSCORED_EVERY != 0

    def observe(self, net_gain: float) -> None:
        """Add the net gain of a scored step, in tokens."""
        self._count += 1
        self.net_gain += max(_MIN_GAIN_WEIGHT, 1 / self._count) * (net_gain - self.net_gain)
        if self._count < _NUM_INITIAL_TRIALS:
            return
        if self.net_gain > 0:
            self._pause = _MIN_PAUSE
        else:
            self._skip_steps = self._pause
            self._pause = min(2 * self._pause, _MAX_PAUSE)

    def observe_time(self, scored: bool, ratio: float) -> None:
        """Add the time of a step.

        Args:
            scored: whether the companion scored the step.
            ratio: observed divided by expected step time.
        """
        self._times[scored].observe(ratio)

    @property
    def extra_time(self) -> float | None:
        """Time that the companion adds to a step, as a fraction of the expected step time.

        ``None`` until enough steps of both kinds have been timed.
        """
        if min(times.weight for times in self._times.values()) < _MIN_TIMED_STEPS:
            return None
        return self._times[True].value - self._times[False].value


class SpeculativeVerification(Adaptive):
    """Selects tokens by S, A and the draft's own signals, with filtered proposals.

    It works like ``adaptive``. In a step that the companion scores, the acceptance estimate is
    P_i = P(accept | S_i, A_i, H_i, q_i(x_i), history, i). The companion scores the whole draft in
    one pass after drafting. It scores only while its scores improve the selection by more than they
    cost. Gain and cost are tracked per batch size. The cost is the additional time of steps with
    the companion: its pass, minus the verification that its scores save. Until steps with and
    without the companion have been timed, the cost is computed from the latency model. Whether the
    companion scores a step is decided before the step's draft.

    The published method selects tokens over the whole batch by S and A of the drawn token. This
    biases the output. Here the same signals are compared with a threshold that is known before the
    step, and the comparison is made for every token of the vocabulary. Of token trees, S and A of
    each node select the nodes; see :class:`draftwise.policies.scored_trees.ScoredTrees`.
    """

    name = "sv"
    summary = "as adaptive, and a companion scores the draft while this increases goodput"
    source = "Speculative Verification, made lossless"
    scores_offers = False
    signals = Adaptive.signals | {Signal.OVERLAP, Signal.AGREEMENT}

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model is required. Without a companion
                the policy behaves like ``adaptive``.
            options: fields of :class:`draftwise.policies.pricing_options.PricingOptions`.
        """
        super().__init__(context, **options)
        self.combined = ModelPair.of(Inputs.COMBINED, context.parameters)
        self._companion_values: dict[tuple[bool, int], _CompanionValue] = {}
        self._has_companion = context.has_companion
        self._scores_step = False
        self._scored_acceptance: Floats | None = None
        # Whether the companion scores the coming step's trees, or has scored the current ones.
        self._scores_trees = False
        self._scored_trees = ScoredTrees()
        # Number of nodes of each tree that would be verified without scores.
        self._planned: list[int] = []
        self._trees_worth: _TreesWorth | None = None
        self._usual_nodes = 0.0

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """As ``adaptive``. Also decides whether the companion scores the step's draft."""
        self._scored_acceptance, self._scores_trees = None, False
        lengths = super().draft_lengths(requests)
        self._scores_step = (
            self._has_companion
            and any(lengths)
            and self._companion_value(len(requests)).scores_step()
        )
        self._uses_signals |= self._scores_step
        return lengths

    def plan_drafts(self, requests: Sequence[RequestState]) -> list[DraftChoice]:
        """As ``adaptive``. The companion scores a step only if the draft model drafts in it."""
        self._scored_acceptance, self._scores_step = None, False
        choices = super().plan_drafts(requests)
        self._scores_step &= not all(choice.uses_offer for choice in choices)
        self._scores_trees &= self._grows_trees
        if not self._scores_trees:
            return choices
        self._planned = [choice.length for choice in choices]
        return [DraftChoice(request.draft_limit, True) for request in requests]

    def branches(self, requests: Sequence[RequestState]) -> bool:
        """As ``adaptive``."""
        self._scores_trees = False
        return super().branches(requests)

    def max_tree_nodes(self, requests: Sequence[RequestState]) -> list[int]:
        """As ``adaptive``. Also decides whether the companion scores the step's trees."""
        self._scores_step = False
        self._scores_trees = (
            self._has_companion
            and self._grows_trees
            and bool(requests)
            and self._companion_value(len(requests), trees=True).scores_step()
        )
        return super().max_tree_nodes(requests)

    def skip_drafts(self, requests: Sequence[RequestState]) -> None:
        """Begin a step that is only timed."""
        super().skip_drafts(requests)
        self._scores_step = self._scores_trees = False

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Update prices, acceptance estimates and the companion's cost."""
        super().observe(outcome, times)
        self._observe_trees(outcome, times)
        if self._draft is None or not any(outcome.num_drafted):
            return
        expected = self.prices.expected_seconds
        if expected and times.is_typical and self._is_priced:
            self._companion_value(len(self._requests)).observe_time(
                self._companion_scores is not None, times.total / expected
            )

    def _observe_trees(self, outcome: Outcome, times: StepTimes) -> None:
        """Learn from scored trees, and compare what the scores gained with what they cost."""
        count = len(outcome.num_verified)
        if self._grows_trees and count:
            nodes = sum(outcome.num_verified) / count
            self._usual_nodes += _NODES_WEIGHT * (nodes - self._usual_nodes)
        worth, self._trees_worth = self._trees_worth, None
        self._scores_trees = False
        if worth is None:
            return
        trees = self._scored_trees
        trees.learn(outcome)
        if trees.explores:
            return
        gain = trees.gained + worth.price * trees.num_dropped
        # On a GPU the selection waits for the companion's pass.
        seconds = times.companion + times.select
        if not times.is_typical:
            seconds = self.prices.companion_seconds(worth.num_read)
        self._companion_value(count, trees=True).observe(gain - seconds * worth.goodput)

    def _begin_step(self, requests: Sequence[RequestState]) -> None:
        """Discard the state of the last step."""
        super()._begin_step(requests)
        self._trees_worth = None
        self._scored_trees.begin_step()

    def wants_companion(self) -> bool:
        """Whether the companion scores this step's draft."""
        return self._scores_step or self._scores_trees

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the tokens whose probability to be accepted reaches the threshold."""
        if draft.parents is not None:
            return self._select_nodes(draft, companion_scores)
        if companion_scores is None:
            return super().select(draft, None)
        self._draft, self._companion_scores = draft, companion_scores
        expected = self._scored_acceptance = self._acceptance_of(draft, companion_scores)
        plan = self.select_scored(draft, companion_scores, expected)
        self._update_companion_value(draft, expected)
        return plan

    def _select_nodes(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the nodes of token trees that are worth their price."""
        plan = super().select(draft, None)
        if not self._scores_trees:
            return plan
        if companion_scores is None:
            # Without scores, a tree that was not drawn has more nodes than are worth verifying.
            lengths = tuple(
                own if draft.is_drawn_tree(index) else planned
                for index, (own, planned) in enumerate(
                    zip(draft.lengths, self._planned, strict=True)
                )
            )
            return Plan(draft.tokens, lengths, draft.probs)
        price = self._node_price(len(draft.lengths))
        nodes = self._scored_trees.select(draft, companion_scores, self._planned, price)
        goodput = self.offers.goodput(len(draft.lengths), self._num_context_tokens)
        self._trees_worth = _TreesWorth(price, goodput, companion_scores.num_read or 0)
        lengths = tuple(len(own) for own in nodes)
        return Plan(draft.tokens, lengths, draft.probs, nodes=nodes)

    def _node_price(self, num_requests: int) -> float:
        """Probability to be accepted at which a scored node is worth verifying.

        It is the price at the usual number of nodes of earlier steps, as it must not depend on what
        was drawn in this one.
        """
        return self.least_node_value(0, round(self._usual_nodes * num_requests))

    def select_scored(
        self, draft: Draft, companion_scores: CompanionScores, expected: Floats
    ) -> Plan:
        """Select the tokens to verify in a scored draft.

        Args:
            draft: the draft, with signals.
            companion_scores: the companion's scores of the draft.
            expected: ``[batch, num_tokens]`` acceptance estimates of the drawn tokens.
        """
        score = self.scorer(self.combined[False])
        return self.keep_likely(
            draft, companion_scores, expected, score, self.verification_threshold
        )

    @property
    def verification_threshold(self) -> float:
        """Minimum probability at which a scored token is verified.

        This is the threshold of the operating point. If the operating point verifies all drafted
        tokens, it is the price of verifying one more token.
        """
        return self.filter_threshold or self._price.verify

    @property
    def acceptance_estimate(self) -> Floats:
        """``[batch, γ]``, from the companion's scores in a step that it scored."""
        return self._expected if self._scored_acceptance is None else self._scored_acceptance

    def learn(
        self,
        signals: Signals,
        greedy: NDArray[np.bool_],
        acceptance: Floats,
        reach_probability: Floats,
    ) -> None:
        """Update the acceptance models; the combined model only if the companion scored."""
        super().learn(signals, greedy, acceptance, reach_probability)
        if self._companion_scores is not None:
            self.combined.observe(signals, greedy, acceptance, reach_probability)

    @property
    def calibration_error(self) -> float | None:
        """Error of the estimate from all signals.

        While the companion has scored few tokens, this is the error of the estimate from the
        draft's own signals.
        """
        combined = calibration_error(self.combined)
        return super().calibration_error if combined is None else combined

    def _acceptance_of(self, draft: Draft, companion_scores: CompanionScores) -> Floats:
        """``[batch, num_tokens]`` acceptance estimates of the drawn tokens from all signals."""
        lengths = np.asarray(draft.lengths)
        rows, places = np.nonzero(np.arange(draft.tokens.shape[1]) < lengths[:, None])
        signals = self.signals_of(draft, companion_scores, rows, places)
        expected = np.zeros(draft.tokens.shape)
        expected[rows, places] = self.combined.predict(signals, self._greedy[rows])
        return expected

    def _companion_value(self, num_requests: int, trees: bool = False) -> _CompanionValue:
        """The companion's value at about a batch size: four values per doubling.

        Args:
            num_requests: number of requests that gain tokens in the step.
            trees: whether it scores token trees.
        """
        return self._companion_values.setdefault(
            (trees, round(4 * math.log2(max(num_requests, 1)))), _CompanionValue()
        )

    def _update_companion_value(self, draft: Draft, expected: Floats) -> None:
        """Record the net gain of a scored step.

        The gain is the number of accepted tokens that the selection by all signals adds to the
        selection by the draft's own signals. Both selections are evaluated with the acceptance
        estimates from all signals. The cost is subtracted from it.
        """
        price, value = self.verification_threshold, self._companion_value(len(self._requests))
        width = draft.tokens.shape[1]
        drafted = np.arange(width) < np.asarray(draft.lengths)[:, None]
        # Offered tokens are verified either way.
        drafted &= ~self._is_offered[:, None]
        prefix_acceptance_prob = np.cumprod(np.where(drafted, expected, 0.0), axis=1)
        free = np.cumprod(np.where(drafted, self._expected[:, :width], 0.0), axis=1)
        with_scores = (prefix_acceptance_prob >= price) & drafted
        without_scores = drafted & (free >= self.filter_threshold)
        more_kept = float(
            prefix_acceptance_prob[with_scores].sum() - prefix_acceptance_prob[without_scores].sum()
        )
        if value.extra_time is not None and self.prices.expected_seconds:
            tokens_per_step = self._price.goodput * self.prices.expected_seconds
            cost = value.extra_time * tokens_per_step
        else:
            more_verified = int(with_scores.sum()) - int(without_scores.sum())
            cost = self.prices.companion_price(self._price, sum(draft.lengths))
            cost += price * more_verified
        value.observe(more_kept - cost)
