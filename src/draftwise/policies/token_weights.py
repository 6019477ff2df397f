"""The value of an accepted token of each request in a batch that nobody joins."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from draftwise.core.latency import LatencyModel
from draftwise.policies.inputs import RequestState

Floats = NDArray[np.float64]

# A request's remaining number of steps varies by this factor times its square root.
_SPREAD = 0.6
# Weight of a step's offer in the rate at which a request can gain tokens.
_RATE_WEIGHT = 0.1


class TokenWeights:
    """Values accepted tokens by what they take off the end of the batch."""

    def __init__(self, latency: LatencyModel) -> None:
        """Set up.

        Args:
            latency: costs of passes.
        """
        self._latency = latency
        self._rates: dict[int, float] = {}

    def weights(
        self, requests: Sequence[RequestState], context: int, uses_offers: bool = True
    ) -> Floats:
        """``[batch]`` value of an accepted token of each request, relative to the mean; at most 1.

        While other requests take the places of those that end, all tokens have the same value. In a
        batch that nobody joins, the request that ends last determines when all is done. If requests
        end one after the other, and T(k) is the time of a step with k of them, the time until all
        is done is the sum over k of the steps of the k-th last one times T(k) − T(k − 1). So a step
        of the last request takes T(1), and one of the request that ends first takes what it adds to
        the whole batch. A request ends after its remaining tokens, divided by the tokens per step
        that its offers let it gain. As that is uncertain, both its place in this order and the
        probability that it is the last one are smooth. No weight is above 1: once the request that
        seems to be the last one gains, another is the last.

        Args:
            requests: the requests of the step, with their offers.
            context: tokens of context, summed over the requests.
            uses_offers: whether offers can be selected in this step.
        """
        count = len(requests)
        if count < 2 or not all(request.expected_remaining for request in requests):
            return np.ones(count)
        rates = [self._rate(request, uses_offers) for request in requests]
        if not any(request.offer for request in requests):
            return np.ones(count)
        remaining = np.array([r.expected_remaining for r in requests]) / rates
        steps = self._latency.target_curve(count)
        attention = self._latency.target_seconds(count, context) - float(steps[-1])
        added = np.maximum(np.diff(steps) + attention / count, 0.0)
        alone, added[0] = float(added[0]), float(added[1])
        spread = max(1.0, _SPREAD * math.sqrt(float(remaining.max())))
        later = (remaining - remaining[:, None]) / spread
        # The number of requests that are expected to run when it ends, itself included.
        places = 0.5 + (0.5 + 0.5 * np.tanh(0.5 * later)).sum(axis=1)
        ends_last = np.exp((remaining - remaining.max()) / spread)
        ends_last /= ends_last.sum()
        values = np.interp(places, np.arange(1, count + 1), added)
        values += max(alone - float(added[0]), 0.0) * ends_last
        mean = float(values.mean())
        weights: Floats = np.minimum(values / mean, 1.0) if mean else np.ones(count)
        return weights

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        for request_id in request_ids:
            self._rates.pop(request_id, None)

    def _rate(self, request: RequestState, uses_offers: bool) -> float:
        """Tokens per step that a request can gain: by its recent offers, or this one if more."""
        rate = self._rates.get(request.request_id, 1.0)
        if not uses_offers:
            return rate
        possible: float = 1.0 + sum(accumulate(request.offer, mul))
        rate += _RATE_WEIGHT * (possible - rate)
        self._rates[request.request_id] = rate
        return max(rate, possible)
