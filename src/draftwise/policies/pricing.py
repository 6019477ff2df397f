"""What to do at which batch size, and the price of a token, followed from step to step.

Both may only depend on earlier steps: what is drafted and verified in a step must not look at the
step's own draws by way of a common budget (see docs/lossless.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache, partial

from draftwise.core.goodput import (
    Costs,
    Floats,
    OperatingPoint,
    Outlook,
    promised_goodput,
    sample_chains,
    worth_drafting,
)
from draftwise.core.latency import LatencyModel

# Prices are rounded to these factors, so that drafting thresholds are computed now and then only.
_GRAIN = 1.08
_USUAL_ACCEPTANCE = 0.6
_THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_OUTLOOK_VALUES = 16
# Steps after which a choice is thought over; the pauses double from the first to the last.
_FIRST_REVIEW, _LAST_REVIEW = 8, 256
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
    """What is done at one batch size."""

    price: Price
    num_steps: int = 0
    next_review: int = _FIRST_REVIEW
    pause: int = field(default=_FIRST_REVIEW)


class PriceBook:
    """The way to run and its prices, by batch size.

    Every now and then all static draft lengths and all thresholds are compared by the goodput they
    promise with the acceptance and the costs as they are known by then, and the best is chosen.

    Attributes:
        outlook: distribution of the predicted acceptance of drafted tokens.
    """

    def __init__(self, latency: LatencyModel, max_draft_length: int) -> None:
        self.outlook = Outlook(_USUAL_ACCEPTANCE)
        self._latency = latency
        self._max_draft_length = max_draft_length
        self._choices: dict[int, _Choice] = {}
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
            choice = self._choices[key] = _Choice(self._best(num_requests, context, None))
        choice.num_steps += 1
        if choice.num_steps >= choice.next_review:
            choice.price = self._best(num_requests, context, choice.price)
            choice.pause = min(2 * choice.pause, _LAST_REVIEW)
            choice.next_review = choice.num_steps + choice.pause
        return choice.price

    def draft_threshold(self, price: Price, num_drafting: int, draws_left: int) -> float:
        """From which probability on that all so far are kept one more draw pays.

        Args:
            price: of the step.
            num_drafting: requests that would share the draft's next pass.
            draws_left: draws that are still allowed.
        """
        return float(
            self._draft_thresholds(price.goodput, price.point.threshold, num_drafting)[draws_left]
        )

    def companion_price(self, price: Price, num_tokens: int) -> float:
        """Tokens that a companion's pass over so many drafted tokens costs."""
        return price.goodput * self._latency.companion_seconds(num_tokens)

    def _best(self, num_requests: int, context: int, now: Price | None) -> Price:
        """The way that promises most, with the one in use preferred among equals."""
        self._values = self.outlook.values(_OUTLOOK_VALUES)
        self._thresholds.cache_clear()
        chains = sample_chains(self._values, self._max_draft_length)
        costs = Costs(
            lambda tokens: self._latency.target_seconds(tokens, context),
            self._latency.draft_seconds,
        )
        goodput = num_requests / costs.target(num_requests) if now is None else now.goodput
        promises: list[tuple[float, float, OperatingPoint]] = []
        for _ in range(2):  # drafting thresholds need the goodput that is looked for
            promises = []
            thresholds = partial(self._draft_thresholds, goodput)
            for point in self._points:
                promise, size = promised_goodput(point, num_requests, chains, costs, thresholds)
                if now is not None and point == now.point:
                    promise *= _ADVANTAGE
                promises.append((promise, size, point))
            goodput = max(promise for promise, _, _ in promises)
        promise, size, point = max(promises, key=lambda each: each[0])
        return Price(point, promise, promise * self._latency.marginal_seconds(size, context))

    def _draft_thresholds(self, goodput: float, threshold: float, num_drafting: int) -> Floats:
        seconds = self._latency.draft_seconds(num_drafting) / max(num_drafting, 1)
        return self._thresholds(threshold, _grain(goodput * seconds))

    def _compute_thresholds(self, verify: float, draft: float) -> Floats:
        return worth_drafting(self._values, verify, draft, self._max_draft_length)


def _grain(value: float) -> float:
    """Round to the next of a geometric series; tiny values to its foot."""
    value = max(value, 1e-4)
    return float(_GRAIN ** round(math.log(value, _GRAIN)))
