"""What to do at which batch size, and the price of a token, followed from step to step.

Both may only depend on earlier steps: what is drafted and verified in a step must not look at the
step's own draws by way of a common budget (see docs/lossless.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from draftwise.core.goodput import (
    Costs,
    Floats,
    OperatingPoint,
    Outlook,
    Promise,
    promises,
    worth_drafting,
)
from draftwise.core.latency import LatencyModel
from draftwise.core.traces import TraceMemory
from draftwise.policies.experience import Experience, Kind, kind_of

_USUAL_ACCEPTANCE = 0.6
_THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_OUTLOOK_VALUES = 16
# Steps after which a choice is thought over for the first time, and again: pauses double when every
# way that may be the best was tried, or as many steps were made; they are short again when another
# kind of way was found to be the best.
_FIRST_REVIEW, _SHORTEST_PAUSE, _LONGEST_PAUSE = 24, 12, 256
_YOUTH = 256
# Of a way that is settled one in so many steps is looked at: looking takes time.
_OBSERVE_EVERY = 4
# Steps of a trial, in which another way and the one in use take turns of so many steps.
_TRIAL, _TURN = 24, 6
# Steps after which the best way of a kind is tried again, however little it promises: nothing else
# shows that the costs of what is not done are thought wrong.
_REVISIT = 1024
# In one of so many reviews the least known of the ways that promise so much of the best is tried:
# what its like took may say little of it.
_CURIOUS_EVERY, _WORTH_A_LOOK = 8, 0.8
# Another way must promise this much more, or the choice stays: estimates waver.
_ADVANTAGE = 1.01


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


@dataclass(frozen=True)
class _Way:
    """A way of running at one batch size.

    Attributes:
        price: with it.
        promise: of it.
        target_seconds: of the target's pass over the tokens that are promised.
    """

    price: Price
    promise: Promise
    target_seconds: float

    @property
    def point(self) -> OperatingPoint:
        """What is done."""
        return self.price.point


@dataclass
class _Choice:
    """What is done at one batch size.

    Attributes:
        best: way by all that is known.
        experience: what came of all ways so far.
        rival: way that takes turns with it, to get to know it.
        is_young: whether ways that may be the best were never tried.
        num_reviews: how often it was thought over.
        last_used: step in which each kind of way was in use last.
    """

    best: _Way
    experience: Experience
    rival: _Way | None = None
    is_young: bool = True
    num_steps: int = 0
    num_reviews: int = 0
    last_review: int = 0
    next_review: int = _FIRST_REVIEW
    pause: int = _SHORTEST_PAUSE
    last_used: dict[Kind, int] = field(default_factory=dict)

    @property
    def now(self) -> _Way:
        """The way of the step: of two that are compared the rival begins."""
        turn = (self.num_steps - self.last_review) // _TURN
        return self.best if self.rival is None or turn % 2 else self.rival


@dataclass(frozen=True)
class _Current:
    """The step that was priced last.

    Attributes:
        choice: of its batch size.
        point: how it is run.
        promise: of that, for this step.
        context: tokens behind its requests in all.
    """

    choice: _Choice
    point: OperatingPoint
    promise: Promise
    context: int


class PriceBook:
    """The way to run and its prices, by batch size.

    Every now and then all static draft lengths and all thresholds are compared by the goodput they
    would have had on the latest drafts, with costs as they are known by then, and the best is
    chosen. What the costs leave out (selection takes time, ragged batches are less regular) shows
    when a way is used, and corrects its promises: see
    :class:`draftwise.policies.experience.Experience`. A way that may be the best and is little
    known is tried, in turns of a few steps with the one in use: so a machine that changes its pace
    meets both.

    Attributes:
        outlook: distribution of the predicted acceptance of drafted tokens.
        traces: the latest drafts.
    """

    def __init__(self, latency: LatencyModel, max_draft_length: int) -> None:
        self.outlook = Outlook(_USUAL_ACCEPTANCE)
        self._latency = latency
        self._max_draft_length = max_draft_length
        self._choices: dict[int, _Choice] = {}
        self.traces = TraceMemory(max_draft_length)
        self._current: _Current | None = None
        self._points = [OperatingPoint(length) for length in range(max_draft_length + 1)]
        if max_draft_length:
            self._points += [OperatingPoint(max_draft_length, each) for each in _THRESHOLDS]
        self._values = self.outlook.values(_OUTLOOK_VALUES)

    def price(self, num_requests: int, context: int) -> Price:
        """How to run a step; call once per step.

        Args:
            num_requests: that gain tokens in it.
            context: tokens behind them in all.
        """
        key = num_requests if num_requests < 8 else round(8 * math.log2(num_requests))
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._first(num_requests, context)
        choice.num_steps += 1
        if choice.num_steps >= choice.next_review:
            self._review(choice, num_requests, context)
        way = choice.now
        promise = self._promise_now(way, num_requests, context)
        self._current = _Current(choice, way.point, promise, context)
        return way.price

    def observe(
        self, seconds: float, num_drafted: Sequence[int], num_verified: Sequence[int]
    ) -> None:
        """How long the step took that was priced last; only of a step without prompts.

        Args:
            seconds: it took.
            num_drafted: tokens, of each request.
            num_verified: drafted tokens, of each request.
        """
        now = self._current
        if now is None:
            return
        settled = now.choice.rival is None and not now.choice.is_young
        if not settled or now.choice.num_steps % _OBSERVE_EVERY == 0:
            work = replace(now.promise, seconds=self.work_seconds(num_drafted, num_verified))
            now.choice.experience.observe(now.point, work, seconds)

    def work_seconds(self, num_drafted: Sequence[int], num_verified: Sequence[int]) -> float:
        """What the passes of the step cost that was priced last, by what is known of them.

        Args:
            num_drafted: tokens, of each request.
            num_verified: drafted tokens, of each request.
        """
        context = 0 if self._current is None else self._current.context
        size = len(num_verified) + sum(num_verified)
        seconds = self._latency.target_seconds(size, context)
        for place in range(max(num_drafted, default=0)):
            seconds += self._latency.draft_seconds(sum(n > place for n in num_drafted))
        return seconds

    @property
    def promised_seconds(self) -> float:
        """Of the step that was priced last; 0 before any."""
        return 0.0 if self._current is None else self._current.promise.seconds

    def draft_thresholds(self, price: Price, num_requests: int) -> Floats:
        """From which probability on that all so far are kept one more draw pays.

        Args:
            price: of the step.
            num_requests: that may share the draft's passes.

        Returns:
            ``[num_requests + 1, max_draft_length + 1]`` by how many share the draft's next pass,
            and by the number of draws that are still allowed.
        """
        draft_prices = price.goodput * self._draft_shares(num_requests)
        return self._draft_thresholds(draft_prices, price.point.threshold)

    def companion_price(self, price: Price, num_tokens: int) -> float:
        """Tokens that a companion's pass over so many drafted tokens costs."""
        return price.goodput * self._latency.companion_seconds(num_tokens)

    def _first(self, num_requests: int, context: int) -> _Choice:
        goodput = num_requests / self._latency.target_seconds(num_requests, context)
        experience = Experience()
        promises = self._promises(num_requests, context, goodput, experience)
        point = max(promises, key=lambda each: promises[each][1].goodput)
        price = self._price(point, promises[point][1], context)
        return _Choice(self._way(price, promises[point][0], context), experience)

    def _review(self, choice: _Choice, num_requests: int, context: int) -> None:
        """Take the way that is best by all that is known, and try one that may be."""
        experience = choice.experience
        experience.fade(choice.num_steps - choice.last_review)
        choice.last_review = choice.num_steps
        so_far = choice.best.price.goodput
        promises = self._promises(num_requests, context, so_far, experience)

        def goodput(point: OperatingPoint) -> float:
            stays = point == choice.best.point
            return promises[point][1].goodput * (_ADVANTAGE if stays else 1.0)

        def hope(point: OperatingPoint) -> float:
            # First every way that may be the best once, then those that still may be.
            settled = point == best or (choice.is_young and experience.knows(point))
            return goodput(point) * (1.0 if settled else experience.optimism(point))

        was_tried = choice.rival is not None
        for way in (choice.best, choice.rival):
            if way is not None:
                choice.last_used[kind_of(way.point)] = choice.num_steps
        best = max(promises, key=goodput)
        if kind_of(best) != kind_of(choice.best.point):
            # What led to that may have been a pause of the machine: it is thought over again soon.
            choice.pause = _SHORTEST_PAUSE
        unknown = [point for point in promises if self._is_overdue(choice, point)]
        choice.num_reviews += not was_tried
        if not unknown and not was_tried and choice.num_reviews % _CURIOUS_EVERY == 0:
            least = _WORTH_A_LOOK * goodput(best)
            unknown = [max((p for p in promises if goodput(p) >= least), key=experience.optimism)]
        hoped = max(unknown, key=goodput) if unknown else max(promises, key=hope)
        price = self._price(best, promises[best][1], context)
        choice.best = self._way(price, promises[best][0], context)
        choice.rival = None
        if not was_tried and hoped != best:
            choice.rival = self._way(replace(price, point=hoped), promises[hoped][0], context)
            choice.next_review = choice.num_steps + _TRIAL
        else:
            choice.is_young &= hoped != best and choice.num_steps < _YOUTH
            if not choice.is_young:
                choice.pause = min(2 * choice.pause, _LONGEST_PAUSE)
            choice.next_review = choice.num_steps + choice.pause
        experience.rival = None if choice.rival is None else choice.rival.point

    @staticmethod
    def _is_overdue(choice: _Choice, point: OperatingPoint) -> bool:
        """Whether no way of this kind was used for long."""
        last = choice.last_used.get(kind_of(point), -_REVISIT)
        return choice.num_steps - last >= _REVISIT

    def _price(self, point: OperatingPoint, promise: Promise, context: int) -> Price:
        seconds = self._latency.marginal_seconds(promise.size, context)
        return Price(point, promise.goodput, promise.goodput * seconds)

    def _way(self, price: Price, promise: Promise, context: int) -> _Way:
        return _Way(price, promise, self._latency.target_seconds(promise.size, context))

    def _promise_now(self, way: _Way, num_requests: int, context: int) -> Promise:
        """The promise of a way, for a batch and a machine that changed a little."""
        promise, more = way.promise, num_requests / way.promise.requests
        size = promise.size * more
        change = self._latency.target_seconds(size, context) - way.target_seconds
        seconds = max(promise.seconds + change, 1e-9)
        return Promise(promise.tokens * more, seconds, size, num_requests)

    def _promises(
        self, num_requests: int, context: int, goodput: float, experience: Experience
    ) -> dict[OperatingPoint, tuple[Promise, Promise]]:
        """What each way promises, and what is to be expected of it.

        Args:
            num_requests: in the batch.
            context: tokens behind them in all.
            goodput: about what is reached.
            experience: with promises so far.
        """
        self._values = self.outlook.values(_OUTLOOK_VALUES)
        traces = self.traces.recall(self._values)
        costs = Costs(
            lambda tokens: self._latency.target_seconds(tokens, context),
            self._latency.draft_seconds,
        )
        shares = self._draft_shares(num_requests)
        known: dict[OperatingPoint, tuple[Promise, Promise]] = {}
        # Drafting thresholds need the goodput that is looked for: at first it is a guess.
        for _ in range(1 if experience.num_steps else 2):
            thresholds = partial(self._draft_thresholds, goodput * shares)
            promised = promises(self._points, num_requests, traces, costs, thresholds)
            for point, promise in zip(self._points, promised, strict=True):
                known[point] = promise, experience.corrected(point, promise)
            goodput = max(expected.goodput for _, expected in known.values())
        return known

    def _draft_shares(self, num_requests: int) -> Floats:
        """``[num_requests + 1]`` seconds of a draft pass for each of those who share it."""
        seconds = [self._latency.draft_seconds(max(count, 1)) for count in range(num_requests + 1)]
        shares: Floats = np.array(seconds) / np.maximum(np.arange(num_requests + 1), 1)
        return shares

    def _draft_thresholds(self, draft_prices: Floats, threshold: float) -> Floats:
        return worth_drafting(self._values, threshold, draft_prices, self._max_draft_length)
