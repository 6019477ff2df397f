"""How a price is formed: the operating point of each batch size, and what a token costs there.

1. Costs say what passes take (:class:`draftwise.core.latency.LatencyModel`).
2. On the latest drafts they give a step estimate for every operating point: tokens and seconds
   (:func:`draftwise.core.goodput.step_estimates`).
3. A step-time correction turns the seconds into what steps at that point really take
   (:class:`draftwise.core.goodput.StepTimeCorrections`).
4. The point with the best goodput is used. A challenger that may be better is tried beside it.
5. That goodput is the price of a second; a token in the target's pass costs its share of it.

All of it depends on earlier steps alone: what is drafted and verified in a step must not look at
the step's own draws by way of a common budget (see docs/lossless.md).
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
    kind_of,
    step_estimates,
)
from draftwise.core.latency import LatencyModel
from draftwise.policies.options import integer_option, number_option


@dataclass(frozen=True)
class PricingOptions:
    """What can be set about prices; every field is an option of the policies that price.

    Attributes:
        explore_every: steps between two explorations, in which a request's whole draft is verified:
            what is never verified is never learnt about.
        learn_every: steps between two that are learnt from, for which signals are looked at even
            where they decide nothing: looking and learning take time.
        warm_up: first steps, of which every other one is learnt from: the first estimates are
            guesses.
        review_every: most steps between two reviews of the operating point: a review takes some
            milliseconds. Pauses are as long as a trial for the first steps of this
            number, and double after them.
        trial_steps: steps of a trial, in which the challenger and the point in use take turns, so
            that a machine that changes its pace meets both.
        memory: drafts, and steps at one batch size, that are remembered: the workload changes.
        prior_steps: steps of its own that count as much against the estimate of an operating point
            as all that is known otherwise.
        exploration_bonus: relative error of an estimate that rests on one step; so much better a
            little-known point may be.
        num_thresholds: thresholds that are compared, evenly spaced between 0 and 1.
        acceptance_guess: mean acceptance of drafted tokens before any was seen.
    """

    explore_every: int = 64
    learn_every: int = 8
    warm_up: int = 64
    review_every: int = 256
    trial_steps: int = 24
    memory: int = 512
    prior_steps: int = 8
    exploration_bonus: float = 0.1
    num_thresholds: int = 12
    acceptance_guess: float = 0.6

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidParameterError: one is out of its range; names ``policy_options.NAME``.
        """
        lowest = {"explore_every": 2, "warm_up": 0, "num_thresholds": 0, "trial_steps": 2}
        for name, value in vars(self).items():
            if name in ("exploration_bonus", "acceptance_guess"):
                low, high = (0.0, 1.0) if name == "exploration_bonus" else (0.05, 0.95)
                number_option(name, value, low, high)
            else:
                integer_option(name, value, lowest.get(name, 1))


@dataclass(frozen=True)
class Price:
    """How to run a step, and what things cost in it, in tokens.

    Attributes:
        point: how far to draft, and from which probability on to verify.
        goodput: λ, tokens per second that are gained anyway.
        verify: one token more in the target's pass: λ times its seconds.
    """

    point: OperatingPoint
    goodput: float
    verify: float


@dataclass
class _Choice:
    """What is done at one batch size.

    Attributes:
        incumbent: price of the operating point in use.
        challenger: price of the point that takes turns with it, if any.
        estimates: of all points, as of the last review.
        corrections: what is known of the step times of all points.
        pause: steps until the next review, unless there is a trial.
        tried: kinds of points that were in use or had a trial.
    """

    incumbent: Price
    estimates: dict[OperatingPoint, StepEstimate]
    corrections: StepTimeCorrections
    pause: int
    challenger: Price | None = None
    num_steps: int = 0
    next_review: int = field(init=False)
    tried: set[tuple[bool, bool]] = field(init=False)

    def __post_init__(self) -> None:
        self.next_review = self.pause
        self.tried = {kind_of(self.incumbent.point)}

    def now(self, turn: int) -> Price:
        """The price of the step; in a trial the challenger begins, then both take turns."""
        if self.challenger is None or (self.next_review - self.num_steps - 1) // turn % 2 == 0:
            return self.incumbent
        return self.challenger


class Pricing:
    """The operating point and its prices, by batch size.

    Attributes:
        drafts: the latest drafts.
    """

    def __init__(
        self, latency: LatencyModel, max_draft_length: int, options: PricingOptions | None = None
    ) -> None:
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
            self._points += [OperatingPoint(max_draft_length, each) for each in thresholds]

    def price(self, num_requests: int, context: int) -> Price:
        """How to run a step; call once per step.

        Args:
            num_requests: that gain tokens in it.
            context: tokens behind them in all.
        """
        key = num_requests if num_requests < 8 else round(8 * math.log2(num_requests))
        choice = self._choices.get(key)
        if choice is None:
            corrections = StepTimeCorrections(self.options.prior_steps, self.options.memory)
            estimates = self._estimates(num_requests, context)
            best = max(estimates, key=lambda point: estimates[point].goodput)
            price = self._price(best, estimates[best], 1.0, context)
            choice = _Choice(price, estimates, corrections, self.options.trial_steps)
            self._choices[key] = choice
        choice.num_steps += 1
        if choice.num_steps >= choice.next_review:
            self._review(choice, num_requests, context)
        price = choice.now(max(1, self.options.trial_steps // 4))
        self._current = choice, price, num_requests, context
        return price

    def observe(
        self, seconds: float, num_drafted: Sequence[int], num_verified: Sequence[int]
    ) -> None:
        """How long the step took that was priced last; only of a step without prompts.

        Args:
            seconds: it took.
            num_drafted: tokens, of each request.
            num_verified: drafted tokens, of each request.
        """
        if self._current is None:
            return
        choice, price, _, _ = self._current
        ratio = seconds / self.work_seconds(num_drafted, num_verified)
        is_incumbent = price is choice.incumbent
        choice.corrections.observe(choice.num_steps, price.point, ratio, is_incumbent)

    def work_seconds(self, num_drafted: Sequence[int], num_verified: Sequence[int]) -> float:
        """What the passes of the step cost that was priced last, as far as costs are known.

        Args:
            num_drafted: tokens, of each request.
            num_verified: drafted tokens, of each request.
        """
        context = 0 if self._current is None else self._current[3]
        size = len(num_verified) + sum(num_verified)
        seconds = self._latency.target_seconds(size, context)
        for place in range(max(num_drafted, default=0)):
            seconds += self._latency.draft_seconds(sum(n > place for n in num_drafted))
        return seconds

    @property
    def expected_seconds(self) -> float:
        """Of the step that was priced last, by its passes; 0 before any."""
        if self._current is None:
            return 0.0
        choice, price, _, _ = self._current
        return choice.estimates[price.point].seconds

    def companion_price(self, price: Price, num_tokens: int) -> float:
        """What a companion's pass over ``num_tokens`` drafted tokens costs, in tokens."""
        return price.goodput * self._latency.companion_seconds(num_tokens)

    def _review(self, choice: _Choice, num_requests: int, context: int) -> None:
        """Use the best operating point, and try one that may be better."""
        corrections, options = choice.corrections, self.options
        corrections.update(choice.num_steps, self._points, choice.incumbent.point)
        estimates = choice.estimates = self._estimates(num_requests, context)
        goodput = {p: e.goodput / corrections.factor(p) for p, e in estimates.items()}

        def hope(point: OperatingPoint) -> float:
            if point == best:
                return goodput[point]
            steps = corrections.num_steps(point) + options.prior_steps
            return goodput[point] * (1 + options.exploration_bonus / math.sqrt(steps))

        # A point that was not tried lately may only become the challenger.
        known = [p for p in goodput if corrections.num_steps(p) or p == choice.incumbent.point]
        best = max(known, key=goodput.__getitem__)
        # A kind that was never tried is tried first: nothing else says what its steps take.
        untried = [p for p in goodput if kind_of(p) not in choice.tried]
        challenger = max(untried or goodput, key=hope)
        was_tried = choice.challenger is not None
        prices = [
            self._price(point, estimates[point], corrections.factor(point), context)
            for point in (best, challenger)
        ]
        choice.incumbent, choice.challenger = prices[0], None
        if challenger != best and not was_tried:
            choice.challenger = prices[1]
            choice.tried.add(kind_of(challenger))
            choice.next_review = choice.num_steps + options.trial_steps
            return
        if choice.num_steps > options.review_every:
            choice.pause = min(2 * choice.pause, options.review_every)
        choice.next_review = choice.num_steps + choice.pause

    def _estimates(self, num_requests: int, context: int) -> dict[OperatingPoint, StepEstimate]:
        self.drafts.complete()
        costs = Costs(
            lambda tokens: self._latency.target_seconds(tokens, context),
            self._latency.draft_seconds,
        )
        drafts = self.drafts.expected, self.drafts.acceptance
        estimates = step_estimates(self._points, num_requests, *drafts, costs)
        return dict(zip(self._points, estimates, strict=True))

    def _price(
        self, point: OperatingPoint, estimate: StepEstimate, factor: float, context: int
    ) -> Price:
        goodput = estimate.goodput / factor
        return Price(
            point, goodput, goodput * self._latency.marginal_seconds(estimate.size, context)
        )
