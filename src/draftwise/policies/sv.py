"""Speculative Verification, lossless and priced: the companion is asked while it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import Draft, Judgement, Plan
from draftwise.estimators.combined import Inputs, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.adaptive import Adaptive, calibration_error
from draftwise.policies.base import PolicyContext, RequestState, Signal
from draftwise.policies.priced import Floats

_FIRST_TRIALS = 6
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 512
_NEWEST = 0.1


class _Worth:
    """Whether the companion's information is worth its pass, at one batch size.

    It is asked a few times at first; while the mean gain is positive it is asked in every step,
    else tried again after pauses that double.
    """

    def __init__(self) -> None:
        self.gain = 0.0
        self._count = 0
        self._pause = _SHORTEST_PAUSE
        self._until = 0

    def asks(self) -> bool:
        """Whether to ask now; call once per step."""
        if self._until:
            self._until -= 1
            return False
        return True

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


class SpeculativeVerification(Adaptive):
    """Selection by S, A and the draft's own signals, from filtered proposals.

    As ``adaptive``, and where the companion is asked P_i = P(accept | S_i, A_i, H_i, q_i(x_i),
    history, i). It judges the whole draft in one pass after it is written, and is asked only while
    the expected tokens its estimates add to the plan, less what the tokens they add cost, pay for
    its pass: value of information, followed per batch size. Whether it is asked is decided before
    the step's draft.

    The published method picks tokens over the whole batch by S and A of the drawn token, which
    biases the output; here the same signals decide by a price known beforehand, for every token of
    the vocabulary alike.
    """

    name = "sv"
    summary = "also asks a companion what it thinks of the draft, while that pays"
    source = "Speculative Verification, made lossless"
    signals = Adaptive.signals | {Signal.OVERLAP, Signal.AGREEMENT}

    def __init__(self, context: PolicyContext, explore_every: int = 64) -> None:
        """Set up.

        Args:
            context: with a latency model; without a companion it does what ``adaptive`` does.
            explore_every: steps between two explorations.
        """
        super().__init__(context, explore_every)
        self.combined = ModelPair.of(Inputs.COMBINED, context.parameters)
        self._worth: dict[int, _Worth] = {}
        self._has_companion = context.has_companion
        self._asks = False

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """As ``adaptive``; also decides whether the companion will be asked."""
        lengths = super().draft_lengths(requests)
        self._asks = self._has_companion and any(lengths) and self._worth_now().asks()
        self._watches |= self._asks
        return lengths

    def wants_judgement(self) -> bool:
        """While the companion's information is worth its pass."""
        return self._asks

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """Verify what pays."""
        if judgement is None:
            return super().select(draft, None)
        self._draft, self._judgement = draft, judgement
        expected = self._judged(draft, judgement)
        plan = self.plan_judged(draft, judgement, expected)
        self._value_information(draft, expected)
        return plan

    def plan_judged(self, draft: Draft, judgement: Judgement, expected: Floats) -> Plan:
        """What to verify of a judged draft; ``expected`` is ``[batch, num_tokens]``."""
        score = self.scorer(self.combined)
        return self.keep_likely(draft, judgement, expected, score, self.judged_threshold)

    @property
    def judged_threshold(self) -> float:
        """From which probability on a judged token is verified: where it pays for its place."""
        return self._price.point.threshold or self._price.verify

    def learn(
        self, signals: Signals, greedy: NDArray[np.bool_], acceptance: Floats, reached: Floats
    ) -> None:
        """Follow the workload with every estimate there is."""
        super().learn(signals, greedy, acceptance, reached)
        if self._judgement is not None:
            self.combined.observe(signals, greedy, acceptance, reached)

    @property
    def calibration_error(self) -> float | None:
        """Of the estimate from all signals, or from the draft's own if nobody else was asked."""
        combined = calibration_error(self.combined)
        return super().calibration_error if combined is None else combined

    def _judged(self, draft: Draft, judgement: Judgement) -> Floats:
        """``[batch, num_tokens]`` P of the drawn tokens from all signals."""
        lengths = np.asarray(draft.lengths)
        rows, places = np.nonzero(np.arange(draft.tokens.shape[1]) < lengths[:, None])
        signals = self.signals_of(draft, judgement, rows, places)
        expected = np.zeros(draft.tokens.shape)
        expected[rows, places] = self.combined.predict(signals, self._greedy[rows])
        return expected

    def _worth_now(self) -> _Worth:
        return self._worth.setdefault(round(4 * math.log2(max(len(self._requests), 1))), _Worth())

    def _value_information(self, draft: Draft, expected: Floats) -> None:
        """How much better the judged plan is than the free one, both as the judge sees them."""
        price = self.judged_threshold
        width = draft.tokens.shape[1]
        drafted = np.arange(width) < np.asarray(draft.lengths)[:, None]
        reach = np.cumprod(np.where(drafted, expected, 0.0), axis=1)
        free = np.cumprod(np.where(drafted, self._expected[:, :width], 0.0), axis=1)
        surplus = reach - price
        with_it = np.where((reach >= price) & drafted, surplus, 0.0).sum()
        chosen = drafted & (free >= self._price.point.threshold)
        without = np.where(chosen, surplus, 0.0).sum()
        cost = self.prices.companion_price(self._price, sum(draft.lengths))
        self._worth_now().observe(float(with_it - without) - cost)
