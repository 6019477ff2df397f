"""Speculative Verification, lossless and priced: the companion is asked while it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.estimators.combined import Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.adaptive import Adaptive, calibration_error
from draftwise.policies.base import PolicyContext, RequestState, Signal
from draftwise.policies.priced import Floats

# Steps at a batch size in which the companion is asked before its worth is scored.
_FIRST_TRIALS = 6
# Steps without it after it was not worth its pass; pauses double.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 512
# While it is worth its pass, one step in this many does without: to know what asking costs.
_LEFT_OUT_EVERY = 8
# Least weight of a new gain in the mean of gains.
_NEWEST = 0.1
# Steps of either kind after which their times are compared.
_ENOUGH_STEPS = 12
# Weight of an old step against the one after it.
_FORGETTING = 0.99
# A pause of the machine says nothing of the companion: a larger ratio counts as this many means.
_MOST_EXTREME = 3.0


class _MeanRatio:
    """Mean of realised over expected seconds, with forgetting; 1 as long as nothing is known."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.value = 1.0

    def observe(self, ratio: float) -> None:
        """Count one more."""
        if self.weight >= 1:
            ratio = min(ratio, _MOST_EXTREME * self.value)
        self.weight = _FORGETTING * self.weight + 1
        self.value += (ratio - self.value) / self.weight


class _Worth:
    """Whether the companion's information is worth its pass, at one batch size.

    It is asked a few times at first; while the mean gain is positive it is asked in all steps but
    a few, else tried again after pauses that double.
    """

    def __init__(self) -> None:
        self.gain = 0.0
        self._count = 0
        self._pause = _SHORTEST_PAUSE
        self._until = 0
        self._turn = 0
        self._times = {False: _MeanRatio(), True: _MeanRatio()}

    def asks(self) -> bool:
        """Whether to ask now; call once per step."""
        if self._until:
            self._until -= 1
            return False
        if self._count < _FIRST_TRIALS or self.gain <= 0:
            return True
        self._turn += 1
        return self._turn % _LEFT_OUT_EVERY != 0

    def observe(self, gain: float) -> None:
        """What asking brought, in tokens, its price taken off."""
        self._count += 1
        self.gain += max(_NEWEST, 1 / self._count) * (gain - self.gain)
        if self._count < _FIRST_TRIALS:
            return
        if self.gain > 0:
            self._pause = _SHORTEST_PAUSE
        else:
            self._until = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def observe_time(self, asked: bool, ratio: float) -> None:
        """Realised over expected seconds of a step."""
        self._times[asked].observe(ratio)

    @property
    def extra_time(self) -> float | None:
        """What asking adds to a step, as a share of its expected seconds; ``None`` if unknown."""
        if min(times.weight for times in self._times.values()) < _ENOUGH_STEPS:
            return None
        return self._times[True].value - self._times[False].value


class SpeculativeVerification(Adaptive):
    """Selection by S, A and the draft's own signals, from filtered proposals.

    As ``adaptive``, and where the companion is asked P_i = P(accept | S_i, A_i, H_i, q_i(x_i),
    history, i). It scores the whole draft in one pass after it is written, and is asked only while
    what its estimates change is worth its price: value of information, followed per batch size. The
    price is what steps with it take longer, its pass less what is verified in vain without it, as
    soon as both have been seen; before, it is computed. Whether it is asked is decided before the
    step's draft.

    The published method picks tokens over the whole batch by S and A of the drawn token, which
    biases the output; here the same signals decide by a price known beforehand, for every token of
    the vocabulary alike.
    """

    name = "sv"
    summary = "also asks a companion what it thinks of the draft, while that pays"
    source = "Speculative Verification, made lossless"
    signals = Adaptive.signals | {Signal.OVERLAP, Signal.AGREEMENT}

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up.

        Args:
            context: with a latency model; without a companion it does what ``adaptive`` does.
            options: fields of :class:`draftwise.policies.pricing.PricingOptions`.
        """
        super().__init__(context, **options)
        self.combined = ModelPair.of(Inputs.COMBINED, context.parameters)
        self._worth: dict[int, _Worth] = {}
        self._has_companion = context.has_companion
        self._asks = False
        self._scored_acceptance: Floats | None = None

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """As ``adaptive``; also decides whether the companion will be asked."""
        self._scored_acceptance = None
        lengths = super().draft_lengths(requests)
        self._asks = self._has_companion and any(lengths) and self._worth_now().asks()
        self._watches |= self._asks
        return lengths

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Follow prices, estimates, and what the companion costs."""
        super().observe(outcome, times)
        if self._draft is None or not any(outcome.num_drafted):
            return
        expected = self.prices.expected_seconds
        if expected and times.is_typical and self._is_priced:
            self._worth_now().observe_time(
                self._companion_scores is not None, times.total / expected
            )

    def wants_companion(self) -> bool:
        """While the companion's information is worth its pass."""
        return self._asks

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Verify what pays."""
        if companion_scores is None:
            return super().select(draft, None)
        self._draft, self._companion_scores = draft, companion_scores
        expected = self._scored_acceptance = self._acceptance_of(draft, companion_scores)
        plan = self.select_scored(draft, companion_scores, expected)
        self._value_information(draft, expected)
        return plan

    def select_scored(
        self, draft: Draft, companion_scores: CompanionScores, expected: Floats
    ) -> Plan:
        """What to verify of a scored draft; ``expected`` is ``[batch, num_tokens]``."""
        score = self.scorer(self.combined[False])
        return self.keep_likely(
            draft, companion_scores, expected, score, self.verification_threshold
        )

    @property
    def verification_threshold(self) -> float:
        """From which probability on a scored token is verified: where it pays for its place."""
        return self._price.point.threshold or self._price.verify

    @property
    def believed(self) -> Floats:
        """With what the companion said, if it was asked."""
        return self._expected if self._scored_acceptance is None else self._scored_acceptance

    def learn(
        self, signals: Signals, greedy: NDArray[np.bool_], acceptance: Floats, reached: Floats
    ) -> None:
        """Follow the workload with every estimate there is."""
        super().learn(signals, greedy, acceptance, reached)
        if self._companion_scores is not None:
            self.combined.observe(signals, greedy, acceptance, reached)

    @property
    def calibration_error(self) -> float | None:
        """Of the estimate from all signals, or from the draft's own if nobody else was asked."""
        combined = calibration_error(self.combined)
        return super().calibration_error if combined is None else combined

    def _acceptance_of(self, draft: Draft, companion_scores: CompanionScores) -> Floats:
        """``[batch, num_tokens]`` P of the drawn tokens from all signals."""
        lengths = np.asarray(draft.lengths)
        rows, places = np.nonzero(np.arange(draft.tokens.shape[1]) < lengths[:, None])
        signals = self.signals_of(draft, companion_scores, rows, places)
        expected = np.zeros(draft.tokens.shape)
        expected[rows, places] = self.combined.predict(signals, self._greedy[rows])
        return expected

    def _worth_now(self) -> _Worth:
        return self._worth.setdefault(round(4 * math.log2(max(len(self._requests), 1))), _Worth())

    def _value_information(self, draft: Draft, expected: Floats) -> None:
        """How much better the scored plan is than the free one, both as the companion sees them."""
        price, worth = self.verification_threshold, self._worth_now()
        width = draft.tokens.shape[1]
        drafted = np.arange(width) < np.asarray(draft.lengths)[:, None]
        prefix_acceptance_prob = np.cumprod(np.where(drafted, expected, 0.0), axis=1)
        free = np.cumprod(np.where(drafted, self._expected[:, :width], 0.0), axis=1)
        with_it = (prefix_acceptance_prob >= price) & drafted
        without = drafted & (free >= self._price.point.threshold)
        more_kept = float(
            prefix_acceptance_prob[with_it].sum() - prefix_acceptance_prob[without].sum()
        )
        if worth.extra_time is not None and self.prices.expected_seconds:
            tokens_per_step = self._price.goodput * self.prices.expected_seconds
            cost = worth.extra_time * tokens_per_step
        else:
            more_verified = int(with_it.sum()) - int(without.sum())
            cost = self.prices.companion_price(self._price, sum(draft.lengths))
            cost += price * more_verified
        worth.observe(more_kept - cost)
