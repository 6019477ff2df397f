"""What to do at which batch size, and the price of a token, followed from step to step.

Both may only depend on earlier steps: what is drafted and verified in a step must not look at the
step's own draws by way of a common budget (see docs/lossless.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from draftwise.core.goodput import (
    Costs,
    Floats,
    OperatingPoint,
    Outlook,
    Promise,
    promised_goodput,
    worth_drafting,
)
from draftwise.core.latency import LatencyModel
from draftwise.core.traces import TraceMemory
from draftwise.policies.experience import Experience, Kind, kind_of

# Prices are rounded to these factors, so that drafting thresholds are computed now and then only.
_GRAIN = 1.12
_USUAL_ACCEPTANCE = 0.6
_THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_OUTLOOK_VALUES = 16
# Steps after which a choice is thought over for the first time, and again: pauses double when every
# way that may be the best was tried, or as many steps were made. Steps for which another way is
# tried.
_FIRST_REVIEW, _SHORTEST_PAUSE, _LONGEST_PAUSE = 24, 12, 64
_TRIAL = 12
_YOUTH = 256
# Steps after which the best way of a kind is tried again, however little it promises: nothing else
# shows that the costs of what is not done are thought wrong.
_REVISIT = 1024
# Another way must promise this much more, or the choice stays: estimates waver.
_ADVANTAGE = 1.005


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
        price: of the way in use.
        promise: of that way.
        target_seconds: of the promise, spent in the target's pass.
        on_trial: whether it is in use only to get to know it.
        is_young: whether ways that may be the best were never tried.
        last_used: step in which each kind of way was in use last.
        experience: what came of all ways so far.
    """

    price: Price
    promise: Promise
    target_seconds: float
    experience: Experience
    on_trial: bool = False
    is_young: bool = True
    num_steps: int = 0
    last_review: int = 0
    next_review: int = _FIRST_REVIEW
    pause: int = _SHORTEST_PAUSE
    last_used: dict[Kind, int] = field(default_factory=dict)


class PriceBook:
    """The way to run and its prices, by batch size.

    Every now and then all static draft lengths and all thresholds are compared by the goodput they
    would have had on the latest drafts, with costs as they are known by then, and the best is
    chosen. What the costs leave out (selection takes time, ragged batches are less regular) shows
    when a way is used, and corrects its promises: see
    :class:`draftwise.policies.experience.Experience`. A way that may be the best and is little
    known is tried for a few steps.

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
        self._current: tuple[_Choice, Promise] | None = None
        self._points = [OperatingPoint(length) for length in range(max_draft_length + 1)]
        if max_draft_length:
            self._points += [OperatingPoint(max_draft_length, each) for each in _THRESHOLDS]
        self._thresholds = lru_cache(maxsize=1024)(self._compute_thresholds)
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
        self._current = choice, self._promise_now(choice, num_requests, context)
        return choice.price

    def observe(self, seconds: float) -> None:
        """How long the step took that was priced last; only of a step without prompts."""
        if self._current is not None:
            choice, promise = self._current
            choice.experience.observe(choice.price.point, promise, seconds)

    @property
    def promised_seconds(self) -> float:
        """Of the step that was priced last; 0 before any."""
        return 0.0 if self._current is None else self._current[1].seconds

    def draft_thresholds(self, price: Price, num_drafting: int) -> Floats:
        """From which probability on that all so far are kept one more draw pays.

        Args:
            price: of the step.
            num_drafting: requests that would share the draft's next pass.

        Returns:
            ``[max_draft_length + 1]`` by the number of draws that are still allowed.
        """
        return self._draft_thresholds(price.goodput, price.point.threshold, num_drafting)

    def companion_price(self, price: Price, num_tokens: int) -> float:
        """Tokens that a companion's pass over so many drafted tokens costs."""
        return price.goodput * self._latency.companion_seconds(num_tokens)

    def _first(self, num_requests: int, context: int) -> _Choice:
        goodput = num_requests / self._latency.target_seconds(num_requests, context)
        experience = Experience()
        promises = self._promises(num_requests, context, goodput, experience)
        point = max(promises, key=lambda each: promises[each][1].goodput)
        price = self._price(point, promises[point][1], context)
        promise = promises[point][0]
        seconds = self._latency.target_seconds(promise.size, context)
        return _Choice(price, promise, seconds, experience)

    def _review(self, choice: _Choice, num_requests: int, context: int) -> None:
        """Take the way that is best by all that is known, or try one that may be."""
        experience = choice.experience
        experience.fade(choice.num_steps - choice.last_review)
        choice.last_review = choice.num_steps
        promises = self._promises(num_requests, context, choice.price.goodput, experience)

        def goodput(point: OperatingPoint) -> float:
            stays = point == choice.price.point and not choice.on_trial
            return promises[point][1].goodput * (_ADVANTAGE if stays else 1.0)

        def hope(point: OperatingPoint) -> float:
            # First every way that may be the best once, then those that still may be.
            settled = point == best or (choice.is_young and experience.knows(point))
            return goodput(point) * (1.0 if settled else experience.optimism(point))

        choice.last_used[kind_of(choice.price.point)] = choice.num_steps
        best = max(promises, key=goodput)
        unknown = [point for point in promises if self._is_overdue(choice, point)]
        point = max(unknown, key=goodput) if unknown else max(promises, key=hope)
        choice.on_trial = not choice.on_trial and point != best
        if not choice.on_trial:
            choice.is_young &= point != best and choice.num_steps < _YOUTH
            point = best
            if not choice.is_young:
                choice.pause = min(2 * choice.pause, _LONGEST_PAUSE)
        choice.next_review = choice.num_steps + (_TRIAL if choice.on_trial else choice.pause)
        price = self._price(best, promises[best][1], context)
        choice.price = replace(price, point=point)
        choice.promise = promises[point][0]
        choice.target_seconds = self._latency.target_seconds(choice.promise.size, context)

    @staticmethod
    def _is_overdue(choice: _Choice, point: OperatingPoint) -> bool:
        """Whether no way of this kind was used for long."""
        last = choice.last_used.get(kind_of(point), -_REVISIT)
        return choice.num_steps - last >= _REVISIT

    def _price(self, point: OperatingPoint, promise: Promise, context: int) -> Price:
        seconds = self._latency.marginal_seconds(promise.size, context)
        return Price(point, promise.goodput, promise.goodput * seconds)

    def _promise_now(self, choice: _Choice, num_requests: int, context: int) -> Promise:
        """The promise of the way in use, for a batch and a machine that changed a little."""
        promise, more = choice.promise, num_requests / choice.promise.requests
        size = promise.size * more
        change = self._latency.target_seconds(size, context) - choice.target_seconds
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
        self._thresholds.cache_clear()
        traces = self.traces.recall(self._values)
        costs = Costs(
            lambda tokens: self._latency.target_seconds(tokens, context),
            self._latency.draft_seconds,
        )
        promises: dict[OperatingPoint, tuple[Promise, Promise]] = {}
        # Drafting thresholds need the goodput that is looked for: at first it is a guess.
        for _ in range(1 if experience.num_steps else 2):
            thresholds = partial(self._draft_thresholds, goodput)
            for point in self._points:
                promise = promised_goodput(point, num_requests, traces, costs, thresholds)
                promises[point] = promise, experience.corrected(point, promise)
            goodput = max(expected.goodput for _, expected in promises.values())
        return promises

    def _draft_thresholds(self, goodput: float, threshold: float, num_drafting: int) -> Floats:
        seconds = self._latency.draft_seconds(num_drafting) / max(num_drafting, 1)
        return self._thresholds(threshold, _grain(goodput * seconds))

    def _compute_thresholds(self, verify: float, draft: float) -> Floats:
        return worth_drafting(self._values, verify, draft, self._max_draft_length)


def _grain(value: float) -> float:
    """Round to the next of a geometric series; tiny values to its foot."""
    value = max(value, 1e-4)
    return float(_GRAIN ** round(math.log(value, _GRAIN)))
