"""The price of a token, per batch size, followed from step to step.

A price may only depend on earlier steps: what is drafted and verified in a step must not look at
the step's own draws by way of a common budget (see docs/lossless.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from draftwise.core.goodput import Outlook, expected_accepted, worth_drafting
from draftwise.core.latency import LatencyModel

# Weight of the newest step, and how many steps the first guess is worth.
_NEWEST = 0.03
_GUESS_STEPS = 4
# Prices are rounded to these factors, so that drafting thresholds are computed now and then only.
_GRAIN = 1.06
_USUAL_ACCEPTANCE = 0.6
_DRAFT_LENGTHS = (0, 1, 2, 3, 5, 7)


@dataclass(frozen=True)
class Price:
    """What things cost in this step, in tokens.

    Attributes:
        goodput: λ, tokens per second that are gained anyway.
        verify: one token more in the target's pass: λ times its seconds.
    """

    goodput: float
    verify: float


@dataclass
class _Bucket:
    """Means over recent steps of one batch size."""

    tokens: float
    seconds: float
    target_tokens: float
    count: int = _GUESS_STEPS


class PriceBook:
    """Prices by batch size, from realised goodput and the latency model.

    Attributes:
        outlook: distribution of the predicted acceptance of drafted tokens.
    """

    def __init__(self, latency: LatencyModel, max_draft_length: int) -> None:
        self.outlook = Outlook(_USUAL_ACCEPTANCE)
        self._latency = latency
        self._max_draft_length = max_draft_length
        self._buckets: dict[int, _Bucket] = {}
        self._outlook_age = 0
        self._thresholds = lru_cache(maxsize=256)(self._compute_thresholds)

    def price(self, num_requests: int, context: int) -> Price:
        """Prices for a step.

        Args:
            num_requests: that gain tokens in it.
            context: tokens behind them in all.
        """
        bucket = self._bucket(num_requests, context)
        goodput = bucket.tokens / bucket.seconds
        marginal = self._latency.marginal_seconds(bucket.target_tokens, context)
        return Price(goodput, goodput * marginal)

    def draft_thresholds(self, price: Price, num_drafting: int) -> np.ndarray:
        """From which probability on that all so far are kept drafting one more pays.

        Args:
            price: of the step.
            num_drafting: requests that would share the draft's next pass.

        Returns:
            ``[max_draft_length + 1]`` by the number of draws still allowed.
        """
        seconds = self._latency.draft_seconds(num_drafting) / max(num_drafting, 1)
        return self._thresholds(_grain(price.verify), _grain(price.goodput * seconds))

    def companion_price(self, price: Price, num_tokens: int) -> float:
        """Tokens that a companion's pass over so many drafted tokens costs."""
        return price.goodput * self._latency.companion_seconds(num_tokens)

    def observe(
        self, num_requests: int, context: int, target_tokens: int, tokens: float, seconds: float
    ) -> None:
        """Learn from a step without prompts.

        Args:
            num_requests: that gained tokens.
            context: tokens behind them in all.
            target_tokens: tokens in the target's pass.
            tokens: gained (expected rather than drawn: less noise).
            seconds: the step took.
        """
        bucket = self._bucket(num_requests, context)
        # A pause of the machine is not a property of the step.
        usual = bucket.seconds
        seconds = min(max(seconds, usual / 3), usual * 3)
        bucket.count += 1
        weight = max(_NEWEST, 1 / bucket.count)
        bucket.tokens += weight * (tokens - bucket.tokens)
        bucket.seconds += weight * (seconds - bucket.seconds)
        bucket.target_tokens += weight * (target_tokens - bucket.target_tokens)
        self._outlook_age += 1
        if self._outlook_age % 50 == 0:
            self._thresholds.cache_clear()

    def _compute_thresholds(self, verify: float, draft: float) -> np.ndarray:
        return worth_drafting(self.outlook.values(), verify, draft, self._max_draft_length)

    def _bucket(self, num_requests: int, context: int) -> _Bucket:
        key = num_requests if num_requests < 8 else round(8 * math.log2(num_requests))
        if key not in self._buckets:
            self._buckets[key] = self._guess(num_requests, context)
        return self._buckets[key]

    def _guess(self, num_requests: int, context: int) -> _Bucket:
        """What the best constant draft length would give at the usual acceptance."""
        best: _Bucket | None = None
        for length in _DRAFT_LENGTHS:
            if length > self._max_draft_length:
                break
            target_tokens = num_requests * (1 + length)
            tokens = num_requests * (1 + expected_accepted(_USUAL_ACCEPTANCE, length))
            seconds = self._latency.target_seconds(target_tokens, context)
            seconds += length * self._latency.draft_seconds(num_requests)
            if best is None or tokens / seconds > best.tokens / best.seconds:
                best = _Bucket(tokens, seconds, target_tokens)
        assert best is not None
        return best


def _grain(value: float) -> float:
    """Round to the next of a geometric series; tiny values to its foot."""
    value = max(value, 1e-4)
    return float(_GRAIN ** round(math.log(value, _GRAIN)))
