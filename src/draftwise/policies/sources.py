"""The choice between an offer and a draft model, for each request of a batch.

An offer is a continuation that is known before anything is drafted (see
:mod:`draftwise.policies.offers`). The choice looks at offers and at earlier steps, never at what
the draft model draws, so it cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from draftwise.core.goodput import StepEstimate
from draftwise.core.latency import LatencyModel
from draftwise.policies.inputs import RequestState
from draftwise.policies.model_gains import ModelGains
from draftwise.policies.nearest import record_of
from draftwise.policies.recent_mean import RecentMean

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# The cost of one more token in a draft pass is measured over this many tokens beyond the batch.
_SLOPE_TOKENS = 8
# Number of recent steps in the pace of steps without a draft model.
_PACE_MEMORY = 16
# The pace of the nearest known batch size counts as so many steps.
_PRIOR_STEPS = 4


class SourceChoice:
    """Chooses between offers and a draft model by prices.

    Attributes:
        gains: what a draft of the model gains.
    """

    def __init__(self, latency: LatencyModel) -> None:
        """Set up.

        Args:
            latency: costs of passes.
        """
        self._latency = latency
        self.gains = ModelGains()
        self._paces: dict[int, RecentMean] = {}

    def pace(self, num_requests: int) -> float:
        """Duration of recent steps without a draft model, relative to the cost model's.

        Args:
            num_requests: number of requests that gain tokens in the step.
        """
        return self._pace(num_requests).value

    def observe_pace(
        self, num_requests: int, context: int, num_verified: int, seconds: float
    ) -> None:
        """Record a step in which the draft model did not run, and no prompt was processed.

        Args:
            num_requests: number of requests that gained tokens.
            context: tokens of context, summed over the requests.
            num_verified: number of verified tokens.
            seconds: duration of the step.
        """
        usual = self._latency.target_seconds(num_requests + num_verified, context)
        self._pace(num_requests).observe_duration(seconds / max(usual, 1e-9))

    def _pace(self, num_requests: int) -> RecentMean:
        """The pace at a batch size; a new one begins with that of the nearest known one."""
        return record_of(
            self._paces,
            num_requests,
            lambda pace: pace.count >= _PACE_MEMORY,
            lambda known: (
                RecentMean(_PACE_MEMORY, 1.0) if known is None else known.as_prior(_PRIOR_STEPS)
            ),
        )

    def choose(
        self,
        requests: Sequence[RequestState],
        values: Floats,
        selected: Integers,
        context: int,
        estimate: StepEstimate | None,
        slowdown: float = 1.0,
    ) -> tuple[NDArray[np.bool_], float]:
        """For which requests the draft model drafts, instead of using the offer.

        A draft pass takes nearly the same time for one request as for all. So each pass has a fixed
        cost, which the requests that use the model share, and a cost for each of them. The model
        drafts for the requests for which it saves more than the offer, if these savings together
        exceed the fixed cost. A request that the model has not followed costs more, because its
        missing tokens are read first. Where an offer is good, the text is often easy for the model
        too.

        Args:
            requests: the requests of the step, with their offers.
            values: ``[batch]`` seconds that an accepted token saves.
            selected: ``[batch]`` number of offered tokens that are worth verifying.
            context: tokens of context, summed over the requests.
            estimate: step estimate at the operating point of the draft model, if it drafts for all
                requests; ``None`` if its drafts are not worth their cost.
            slowdown: factor on the duration of such a step, from earlier ones.

        Returns:
            ``[batch]`` these requests, and the seconds that this choice is expected to save,
            compared with one without any offers.
        """
        count, latency = len(requests), self._latency
        rows = count + int(selected.sum())
        more_rows = latency.target_seconds(rows + count, context)
        per_row = max(more_rows - latency.target_seconds(rows, context), 0.0) / count
        of_offers = [
            max(0.0, value * sum(accumulate(request.offer[:kept], mul)) - per_row * kept)
            for request, value, kept in zip(
                requests, values.tolist(), selected.tolist(), strict=True
            )
        ]
        if estimate is None:
            return np.zeros(count, dtype=bool), sum(of_offers)
        # A threshold ends drafts early.
        passes = estimate.passes
        single, more = latency.draft_seconds(1), count + _SLOPE_TOKENS
        per_token = max(0.0, latency.draft_seconds(more) - single) / (more - 1)
        verified = estimate.size / count - 1.0
        own_cost = per_row * verified + per_token * passes
        own_cost += (slowdown - 1.0) * estimate.seconds / count
        gained = estimate.tokens / count - 1.0
        num_behind = np.array([request.num_behind for request in requests])
        worth = values * self.gains.expected(requests, gained)
        of_model = (worth - own_cost - per_token * num_behind).tolist()
        shared_cost = passes * max(0.0, single - per_token) + latency.first_draft_extra
        # Looking is not credited with leaving out requests for which the model gains nothing.
        model_alone = max(0.0, sum(max(gain, 0.0) for gain in of_model) - shared_cost)
        gains = [model - offer for model, offer in zip(of_model, of_offers, strict=True)]
        more_by_model = sum(max(gain, 0.0) for gain in gains) - shared_cost
        prefers = [gain > 0 and more_by_model > 0 for gain in gains]
        saved = sum(of_offers) + max(0.0, more_by_model) - model_alone
        return np.array(prefers, dtype=bool), saved
