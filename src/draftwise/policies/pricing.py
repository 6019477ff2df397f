"""Pricing: the operating point of each batch size, and the price of a verified token.

1. :class:`draftwise.core.latency.LatencyModel` gives the costs of passes.
2. :func:`draftwise.core.goodput.step_estimates` computes a step estimate, in tokens and seconds,
   for every operating point from the latest drafts.
3. :class:`draftwise.core.goodput.StepTimeCorrections` corrects the seconds by the observed times of
   steps at that point.
4. The operating point with the best goodput is used. A challenger that may be better is tried in
   turn with it.
5. This goodput is the price of a second. The price of a token in the target's pass is this price
   times the seconds that the token adds.

All prices depend on earlier steps only. What is drafted and verified in a step must not depend on
the step's own draws through a common budget (see docs/lossless.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwise.core.goodput import (
    Costs,
    DraftMemory,
    OperatingPoint,
    StepEstimate,
    StepTimeCorrections,
    point_kind,
    step_estimates,
    without_worse_twins,
)
from draftwise.core.latency import LatencyModel
from draftwise.policies.nearest import nearest
from draftwise.policies.pricing_options import PricingOptions

# A trial ends early once the challenger's goodput over a few steps is below this share of the
# incumbent's.
_HOPELESS, _FEW_STEPS = 0.9, 3


@dataclass(frozen=True)
class Price:
    """The operating point of a step, and its prices.

    Attributes:
        point: maximum draft length, and threshold for drafting or for verification too.
        goodput: λ, the expected tokens per second at the operating point.
        verify: price of one more token in the target's pass, in tokens: λ times its seconds.
    """

    point: OperatingPoint
    goodput: float
    verify: float


@dataclass
class _Choice:
    """The state of pricing at one batch size.

    Attributes:
        incumbent: price of the operating point in use.
        estimates: step estimates of all points, as of the last review.
        corrections: step-time corrections of all points.
        pause: number of steps until the next review if there is no trial.
        tried: kinds of points that were in use or had a trial, here or at the batch size with which
            this one began.
        challenger: price of the point that takes turns with the incumbent; ``None`` without a
            trial.
        had_trial: whether a trial began at the last review. Its challenger may be given up early.
        num_steps: number of steps so far.
        has_times: whether steps between the last two reviews had times that can be learnt from.
            Without, points are compared by the latency model alone, and none is tried.
        num_timed, num_untimed: number of steps since the last review that had such a time, and that
            had none.
        next_review: step number of the next review.
    """

    incumbent: Price
    estimates: dict[OperatingPoint, StepEstimate]
    corrections: StepTimeCorrections
    pause: int
    tried: set[tuple[bool, bool]]
    challenger: Price | None = None
    had_trial: bool = False
    num_steps: int = 0
    has_times: bool = True
    num_timed: int = 0
    num_untimed: int = 0
    next_review: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_review = self.pause
        self.tried.add(point_kind(self.incumbent.point))

    def step_price(self, turn_steps: int) -> Price:
        """The price of the current step.

        In a trial, incumbent and challenger take turns of ``turn_steps`` steps, and the incumbent
        begins.
        """
        if self.challenger is None or not self.is_turn_of_challenger(self.num_steps, turn_steps):
            return self.incumbent
        return self.challenger

    def is_turn_of_challenger(self, step: int, turn_steps: int) -> bool:
        """Whether a step of a trial is one of the challenger's.

        Args:
            step: number of the step.
            turn_steps: number of steps of a turn.
        """
        return (self.next_review - step - 1) // turn_steps % 2 == 0


class Pricing:
    """The operating point and its prices, by batch size.

    Attributes:
        options: options of pricing.
        drafts: the latest drafts.
    """

    def __init__(
        self,
        latency: LatencyModel,
        max_draft_length: int,
        options: PricingOptions | None = None,
        *,
        filters: bool = True,
    ) -> None:
        """Set up.

        Args:
            latency: costs of passes.
            max_draft_length: maximum draft length of all operating points.
            options: options of pricing; ``None`` for the defaults.
            filters: whether there are operating points at which a threshold selects the tokens to
                verify too.
        """
        self.options = options or PricingOptions()
        self.drafts = DraftMemory(
            self.options.memory, max_draft_length, self.options.acceptance_guess
        )
        self._latency = latency
        self._choices: dict[int, _Choice] = {}
        self._current: tuple[_Choice, Price, int, int] | None = None
        self._points = [OperatingPoint(length) for length in range(max_draft_length + 1)]
        if max_draft_length:
            count = self.options.num_thresholds
            thresholds = [(i + 1) / (count + 1) for i in range(count)]
            self._points += [
                OperatingPoint(max_draft_length, each, verifies_all)
                for each in thresholds
                for verifies_all in ((False, True) if filters else (True,))
            ]

    def price(self, num_requests: int, context: int) -> Price:
        """The price of the next step. Call it once per step.

        Args:
            num_requests: number of requests that gain tokens in the step.
            context: tokens of context, summed over the requests.
        """
        key = _choice_key(num_requests)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._first_choice(key, num_requests, context)
        choice.num_steps += 1
        if choice.num_steps >= choice.next_review:
            self._review(choice, num_requests, context)
        price = choice.step_price(self._turn_steps)
        self._current = choice, price, num_requests, context
        return price

    def _first_choice(self, key: int, num_requests: int, context: int) -> _Choice:
        """Begin at a batch size with what the nearest known one has measured."""
        options = self.options
        known = [
            other
            for other, choice in self._choices.items()
            if choice.num_steps >= options.trial_steps
            and any(map(choice.corrections.num_steps, self._points))
        ]
        found = nearest(known, key)
        if found is None:
            corrections, tried = StepTimeCorrections(options.prior_steps, options.memory), set()
        else:
            model = self._choices[found]
            corrections, tried = model.corrections.as_prior(), set(model.tried)
        estimates = self._estimates(num_requests, context)
        goodput = {p: e.goodput / corrections.factor(p) for p, e in estimates.items()}
        best = max(goodput, key=goodput.__getitem__)
        price = self._price(best, estimates[best], corrections.factor(best), context)
        return _Choice(price, estimates, corrections, options.trial_steps, tried)

    def observe(
        self, seconds: float, num_drafted: Sequence[int], num_verified: Sequence[int]
    ) -> None:
        """Record the time of the step that was priced last. The step must not process prompts.

        Args:
            seconds: duration of the step.
            num_drafted: number of drafted tokens of each request.
            num_verified: number of verified tokens of each request.
        """
        if self._current is None:
            return
        choice, price, _, _ = self._current
        ratio = seconds / self.work_seconds(num_drafted, num_verified)
        is_incumbent = price is choice.incumbent
        choice.corrections.observe(choice.num_steps, price.point, ratio, is_incumbent)
        if price is choice.challenger and self._is_hopeless(choice, price.point):
            choice.challenger = None

    def work_seconds(self, num_drafted: Sequence[int], num_verified: Sequence[int]) -> float:
        """Total cost of the passes in the step that was priced last, by the latency model.

        Args:
            num_drafted: number of drafted tokens of each request.
            num_verified: number of verified tokens of each request.
        """
        context = 0 if self._current is None else self._current[3]
        size = len(num_verified) + sum(num_verified)
        passes = range(max(num_drafted, default=0))
        drafting = [sum(n > place for n in num_drafted) for place in passes]
        seconds = self._latency.target_seconds(size, context)
        return seconds + self._latency.drafting_seconds(drafting)

    @property
    def estimate(self) -> StepEstimate | None:
        """The estimate of the step that was priced last, as of the last review; ``None`` before."""
        if self._current is None:
            return None
        choice, price, _, _ = self._current
        return choice.estimates[price.point]

    @property
    def tries_challenger(self) -> bool:
        """Whether the step that was priced last is one of a challenger that drafts."""
        if self._current is None:
            return False
        choice, price, _, _ = self._current
        return price is choice.challenger and price.point.max_length > 0

    @property
    def in_trial(self) -> bool:
        """Whether the step that was priced last is one of a trial."""
        return self._current is not None and self._current[0].challenger is not None

    def will_measure(self, num_requests: int) -> bool:
        """Whether the next step measures a point of a trial, as far as is known before its price.

        All of the challenger's steps do. The point in use is measured where too few of its steps in
        the trial had its own time for the machine's pace to be that of the trial.

        Args:
            num_requests: number of requests that will gain tokens in it.
        """
        choice = self._choices.get(_choice_key(num_requests))
        if choice is None or choice.challenger is None:
            return False
        step = choice.num_steps + 1
        if step >= choice.next_review:
            return False
        if choice.is_turn_of_challenger(step, self._turn_steps):
            return True
        point, least = choice.incumbent.point, self.options.prior_steps // 2 + 1
        return self._trial_factor(choice, point, least) is None

    def uses_model(self, num_requests: int) -> bool:
        """Whether the operating point in use drafts, as of the last step at this batch size.

        Args:
            num_requests: number of requests that gain tokens.
        """
        choice = self._choices.get(_choice_key(num_requests))
        return choice is None or choice.incumbent.point.max_length > 0

    def has_times(self, num_requests: int) -> bool:
        """Whether steps at this batch size have times that can be learnt from.

        Args:
            num_requests: number of requests that gain tokens.
        """
        choice = self._choices.get(_choice_key(num_requests))
        return choice is None or choice.has_times

    def cancel_trial(self, num_requests: int) -> None:
        """End a trial, because no request can draft with the model.

        Args:
            num_requests: number of requests that gain tokens.
        """
        choice = self._choices.get(_choice_key(num_requests))
        if choice is not None:
            choice.challenger = None

    def count_step(self, is_typical: bool) -> None:
        """Count the step that was priced last.

        Args:
            is_typical: whether its time can be learnt from.
        """
        if self._current is not None:
            choice = self._current[0]
            choice.num_timed += is_typical
            choice.num_untimed += not is_typical

    @property
    def _turn_steps(self) -> int:
        """Number of steps of a turn in a trial."""
        return max(1, self.options.trial_steps // 4)

    def slowdown(self, pace: float) -> float:
        """Correction of the last priced step, relative to that of steps without a draft model.

        Args:
            pace: correction of these.
        """
        if self._current is None:
            return 1.0
        choice, price, _, _ = self._current
        return choice.corrections.factor(price.point) / pace

    @property
    def expected_seconds(self) -> float:
        """Estimated seconds of the step that was priced last, uncorrected; 0 before any step."""
        estimate = self.estimate
        return 0.0 if estimate is None else estimate.seconds

    def companion_seconds(self, num_tokens: int) -> float:
        """Expected seconds of the companion's pass over ``num_tokens`` drafted tokens."""
        return self._latency.companion_seconds(num_tokens)

    def companion_price(self, price: Price, num_tokens: int) -> float:
        """Price of the companion's pass over ``num_tokens`` drafted tokens, in tokens."""
        return price.goodput * self.companion_seconds(num_tokens)

    def _is_hopeless(self, choice: _Choice, challenger: OperatingPoint) -> bool:
        """Whether the first steps of a trial show that the challenger is much worse."""
        corrections, incumbent = choice.corrections, choice.incumbent.point
        factor = self._trial_factor(choice, challenger, _FEW_STEPS)
        if factor is None:
            return False
        goodput = choice.estimates[challenger].goodput / factor
        needed = choice.estimates[incumbent].goodput / corrections.factor(incumbent)
        return goodput < _HOPELESS * needed

    def _trial_factor(self, choice: _Choice, point: OperatingPoint, least: int) -> float | None:
        """The correction of a point by its steps in the trial alone.

        ``None`` if these are fewer than ``least``.
        """
        began = choice.next_review - self.options.trial_steps
        return choice.corrections.recent_factor(point, began, least)

    def _review(self, choice: _Choice, num_requests: int, context: int) -> None:
        """Select the best operating point, and a challenger that may be better."""
        corrections, options = choice.corrections, self.options
        choice.has_times = choice.num_timed > 0 or not choice.num_untimed
        choice.num_timed = choice.num_untimed = 0
        corrections.update(choice.num_steps, self._points, choice.incumbent.point)
        estimates = choice.estimates = self._estimates(num_requests, context)
        goodput = {
            point: estimates[point].goodput / corrections.factor(point)
            for point in without_worse_twins(estimates, choice.incumbent.point)
        }

        def optimistic_goodput(point: OperatingPoint) -> float:
            """Goodput with an exploration bonus for every point except the best one."""
            if point == best:
                return goodput[point]
            steps = corrections.num_steps(point) + options.prior_steps
            return goodput[point] * (1 + options.exploration_bonus / math.sqrt(steps))

        # A point without recent steps may only become the challenger.
        known = [p for p in goodput if corrections.num_steps(p) or p == choice.incumbent.point]
        best = max(known if choice.has_times else goodput, key=goodput.__getitem__)
        choice.tried.add(point_kind(best))
        # A kind that was never tried is tried first, because its step times are unknown.
        untried = [p for p in goodput if point_kind(p) not in choice.tried]
        challenger = best
        if choice.has_times:
            challenger = max(untried or goodput, key=optimistic_goodput)
        was_tried, choice.had_trial = choice.had_trial, False
        prices = [
            self._price(point, estimates[point], corrections.factor(point), context)
            for point in (best, challenger)
        ]
        choice.incumbent, choice.challenger = prices[0], None
        # Two trials never follow each other directly.
        if challenger != best and not was_tried:
            choice.challenger, choice.had_trial = prices[1], True
            choice.tried.add(point_kind(challenger))
            choice.next_review = choice.num_steps + options.trial_steps
            return
        if choice.num_steps > options.review_every:
            choice.pause = min(2 * choice.pause, options.review_every)
        choice.next_review = choice.num_steps + choice.pause

    def _estimates(self, num_requests: int, context: int) -> dict[OperatingPoint, StepEstimate]:
        """Step estimates of all operating points."""
        self.drafts.complete()
        costs = Costs(
            lambda tokens: self._latency.target_seconds(tokens, context),
            self._latency.draft_seconds,
            self._latency.first_draft_extra,
        )
        drafts = self.drafts.expected, self.drafts.acceptance
        estimates = step_estimates(self._points, num_requests, *drafts, costs)
        return dict(zip(self._points, estimates, strict=True))

    def _price(
        self, point: OperatingPoint, estimate: StepEstimate, factor: float, context: int
    ) -> Price:
        """The price of a point from its step estimate and its step-time correction."""
        goodput = estimate.goodput / factor
        return Price(
            point, goodput, goodput * self._latency.marginal_seconds(estimate.size, context)
        )


def _choice_key(num_requests: int) -> int:
    """Eight groups of batch sizes per doubling share a choice; below 8 each has its own."""
    return round(8 * math.log2(num_requests))
