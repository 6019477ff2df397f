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
_FIRST_REVIEW, _LAST_REVIEW = 8, 128
# Another way must promise this much more, or the choice stays: estimates waver.
_ADVANTAGE = 1.005
# Steps whose realised goodput outweighs what was thought before, and how much of the difference
# between two kinds of ways is forgotten in every review.
_DOUBT = 48
_FADING = 0.1
# Share of a promise that a ragged batch keeps against an even one, as long as nothing is seen: its
# attention is padded to the longest draft.
_RAGGED_PROMISE = 0.96


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
    """What is done at one batch size, and what came of it.

    Attributes:
        price: of the way in use.
        kept_promise: realised over promised goodput, for ways with and without a threshold.
        tokens: gained since the last review.
        seconds: spent since then.
        num_observed: steps in which.
        usual_seconds: of a step, lately; 0 before any.
    """

    price: Price
    num_steps: int = 0
    next_review: int = _FIRST_REVIEW
    pause: int = _FIRST_REVIEW
    kept_promise: dict[bool, float] = field(
        default_factory=lambda: {False: 1.0, True: _RAGGED_PROMISE}
    )
    tokens: float = 0.0
    seconds: float = 0.0
    num_observed: int = 0
    usual_seconds: float = 0.0

    def settle(self) -> None:
        """Learn how the promise was kept; an old disappointment fades."""
        selects = self.price.point.threshold > 0
        if self.seconds > 0:
            realised = self.tokens / self.seconds
            weight = self.num_observed / (self.num_observed + _DOUBT)
            promised = self.price.goodput / self.kept_promise[selects]
            ratio = min(max(realised / promised, 0.5), 2.0)
            self.kept_promise[selects] += weight * (ratio - self.kept_promise[selects])
            usual = _RAGGED_PROMISE if not selects else 1 / _RAGGED_PROMISE
            other = self.kept_promise[not selects]
            self.kept_promise[not selects] += _FADING * (self.kept_promise[selects] * usual - other)
        self.tokens = self.seconds = 0.0
        self.num_observed = 0


class PriceBook:
    """The way to run and its prices, by batch size.

    Every now and then all static draft lengths and all thresholds are compared by the goodput they
    promise with the acceptance and the costs as they are known by then, and the best is chosen.
    What a promise leaves out (ragged batches cost more than even ones, tokens of a draft are not
    independent) shows in realised goodput, by which the promises of its kind are corrected.

    Attributes:
        outlook: distribution of the predicted acceptance of drafted tokens.
    """

    def __init__(self, latency: LatencyModel, max_draft_length: int) -> None:
        self.outlook = Outlook(_USUAL_ACCEPTANCE)
        self._latency = latency
        self._max_draft_length = max_draft_length
        self._choices: dict[int, _Choice] = {}
        self._current: _Choice | None = None
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
            first = self._best(num_requests, context, None)
            choice = self._choices[key] = _Choice(first)
        self._current = choice
        choice.num_steps += 1
        if choice.num_steps >= choice.next_review:
            choice.settle()
            choice.price = self._best(num_requests, context, choice)
            choice.pause = min(2 * choice.pause, _LAST_REVIEW)
            choice.next_review = choice.num_steps + choice.pause
        return choice.price

    def observe(self, tokens: float, seconds: float) -> None:
        """What came of the step that was priced last; only of a step without prompts.

        Args:
            tokens: gained, expected rather than drawn: less noise.
            seconds: it took.
        """
        choice = self._current
        if choice is not None:
            # A pause of the machine is not a property of the step.
            choice.tokens += tokens
            choice.seconds += min(seconds, 3 * (choice.usual_seconds or seconds))
            choice.num_observed += 1
            choice.usual_seconds = choice.seconds / choice.num_observed

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

    def _best(self, num_requests: int, context: int, now: _Choice | None) -> Price:
        """The way that promises most, with the one in use preferred among equals."""
        self._values = self.outlook.values(_OUTLOOK_VALUES)
        self._thresholds.cache_clear()
        chains = sample_chains(self._values, self._max_draft_length)
        costs = Costs(
            lambda tokens: self._latency.target_seconds(tokens, context),
            self._latency.draft_seconds,
        )
        kept = {False: 1.0, True: _RAGGED_PROMISE} if now is None else now.kept_promise
        goodput = num_requests / costs.target(num_requests) if now is None else now.price.goodput

        def preferred(promised: tuple[float, float, OperatingPoint]) -> float:
            stays = now is not None and promised[2] == now.price.point
            return promised[0] * (_ADVANTAGE if stays else 1.0)

        for _ in range(2):  # drafting thresholds need the goodput that is looked for
            promises = []
            thresholds = partial(self._draft_thresholds, goodput)
            for point in self._points:
                promise, size = promised_goodput(point, num_requests, chains, costs, thresholds)
                promises.append((promise * kept[point.threshold > 0], size, point))
            promise, size, point = max(promises, key=preferred)
            goodput = promise
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
