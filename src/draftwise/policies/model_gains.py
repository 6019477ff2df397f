"""How the gain of a draft model depends on the request, for the choice between it and an offer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from draftwise.policies.inputs import RequestState

Floats = NDArray[np.float64]

# Weight of a draft relative to the one after it, and ridges that pull the slopes over a request's
# history and over its offer towards 0.
_FORGETTING = 0.998
_RIDGES = np.array([0.2, 10.0])
# Number of drafts without a correction with which it begins.
_PRIOR_DRAFTS = 20.0


class ModelGains:
    """Expected number of accepted tokens of a draft, by least squares with forgetting.

    The estimate of an average draft at the operating point is corrected by what drafts gained more
    or less than that. The correction depends on the request's recent acceptance and on the expected
    number of accepted tokens of its offer.
    """

    def __init__(self) -> None:
        """Start without any draft."""
        self._weight = self._y = 0.0
        self._x, self._xy, self._xx = np.zeros(2), np.zeros(2), np.zeros((2, 2))

    def observe(self, requests: Sequence[RequestState], gained: Floats, estimate: float) -> None:
        """Learn from drafts.

        Args:
            requests: ``[n]`` requests for which the model drafted, as before the step.
            gained: ``[n]`` expected number of accepted tokens of their drafts.
            estimate: the estimate for an average draft, as in :meth:`expected`.
        """
        if not requests:
            return
        x = np.stack([_traits(each) for each in requests])
        more = gained - estimate
        kept = _FORGETTING ** len(x)
        self._weight = kept * self._weight + len(x)
        self._y = kept * self._y + float(more.sum())
        self._x = kept * self._x + x.sum(axis=0)
        self._xy = kept * self._xy + x.T @ more
        self._xx = kept * self._xx + x.T @ x

    def expected(self, requests: Sequence[RequestState], estimate: float) -> Floats:
        """``[n]`` expected number of accepted tokens of a draft for each request.

        Args:
            requests: ``[n]`` the requests.
            estimate: the expected number of accepted tokens of an average draft.
        """
        if not self._weight:
            return np.full(len(requests), estimate)
        average = estimate + self._y / (self._weight + _PRIOR_DRAFTS)
        mean = self._x / self._weight
        variation = self._xx - np.outer(self._x, mean) + np.diag(_RIDGES)
        slopes = np.linalg.solve(variation, self._xy - self._y * mean)
        traits = np.stack([_traits(each) for each in requests])
        expected: Floats = np.maximum(average + (traits - mean) @ slopes, 0.0)
        return expected


def _traits(request: RequestState) -> Floats:
    """A request's recent acceptance, and the expected number of accepted tokens of its offer."""
    return np.array([request.history, sum(accumulate(request.offer, mul))])
