"""Prices of offered tokens, whose acceptance is estimated before anything is drafted.

An offer is a continuation that is proposed with certainty, so choosing among its tokens cannot bias
the output (see docs/lossless.md). All offers of a batch are therefore compared with each other. A
token is worth the probability that it is accepted, times the time that an accepted token saves. The
tokens that are worth most are verified, as many as maximise what they save minus what they add to
the target's pass.

An accepted token saves the time of a step divided by the tokens that a step gains: 1/λ seconds,
with the goodput λ of recent steps. This is Dinkelbach's method (1967, "On Nonlinear Fractional
Programming"): with the best λ, maximising tokens − λ·seconds maximises tokens per second.

Looking for continuations takes time too, and the cost model may be wrong about steps that it has
not seen for long. So, where no model drafts, nothing is looked for at regular steps. Where steps
with offers have a smaller goodput than these, they become the exception. Often a token saves hardly
more than it adds. So what tokens add is also measured, at each batch size, as the difference of
steps with and without offered tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from itertools import accumulate
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from draftwise.core.latency import LatencyModel
from draftwise.core.types import StepTimes
from draftwise.policies.inputs import RequestState, TreeLevel
from draftwise.policies.nearest import batch_bucket, nearest
from draftwise.policies.offer_record import OfferRecord

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Of so many steps, two look for nothing: often while it is not certain that offers pay, and later
# so rarely that at most this share of the goodput is lost.
_UNCERTAIN_REST_EVERY, _REST_EVERY, _MOST_LOST = 8, 24, 0.005
# Where offers do not pay, they are looked for in two of so many steps.
_LOOK_EVERY = 20
# Durations are clipped to this factor around the usual one.
_MOST_UNUSUAL = 3.0


class StepKind(Enum):
    """How the requests of a step draft that use no offer. Each kind has its own records."""

    ALONE = auto()  # not at all
    BESIDE_MODEL = auto()  # with a draft model, where that pays
    TREES = auto()  # token trees of a model, with offers as branches, or of offers alone


class OfferPricing:
    """Selects offered tokens over the whole batch by prices, and learns the goodput.

    Attributes:
        kind: kind of the current step.
        looks_now: whether the current step looks for offers.
    """

    def __init__(self, latency: LatencyModel) -> None:
        """Set up.

        Args:
            latency: costs of passes.
        """
        self._latency = latency
        self._records: dict[tuple[StepKind, int], OfferRecord] = {}
        self.kind = StepKind.ALONE
        self.looks_now = self._is_second = True
        self._is_interrupted = False

    def looks(self, num_requests: int, kind: StepKind = StepKind.ALONE) -> bool:
        """Whether the coming step looks for offers. Otherwise :meth:`select` selects nothing.

        It depends on earlier steps only. Call it once per step, or never.

        Args:
            num_requests: number of requests that gain tokens in the step.
            kind: kind of the step.
        """
        self._is_interrupted |= kind is not self.kind
        self.kind = kind
        if not num_requests:
            return False
        record = self._record(num_requests)
        record.num_steps += 1
        known = self._nearest_known(num_requests, kind)
        if known is not None and known.loses:
            looks = record.num_steps % _LOOK_EVERY >= _LOOK_EVERY - 2
        else:
            if known is None or known.gain < 1.0:
                period = _UNCERTAIN_REST_EVERY
            else:
                lost = 2.0 * (1.0 - 1.0 / known.gain)  # in a period, in steps
                period = max(_REST_EVERY, math.ceil(lost / _MOST_LOST))
            looks = record.num_steps % period < period - 2
        if not self._is_second:
            # A change lasts for two steps at least, also if the batch size changes.
            looks = self.looks_now
        self._is_second = looks == self.looks_now and not self._is_interrupted
        self.looks_now, self._is_interrupted = looks, False
        return looks

    def always_look(self, kind: StepKind = StepKind.BESIDE_MODEL) -> None:
        """Begin a step of which :meth:`looks` is not asked, because a draft model runs anyway."""
        changed = kind is not self.kind
        self.kind = kind
        self.looks_now = True
        self._is_second = kind is StepKind.BESIDE_MODEL or not changed

    def interrupt(self) -> None:
        """Count the next step as one that follows a step of another kind."""
        self._is_interrupted = True

    def relative_duration(self, num_requests: int, context: int, seconds: float) -> float:
        """Duration of a step, relative to that of one without drafts by the cost model.

        Args:
            num_requests: number of requests that gained tokens.
            context: tokens of context, summed over the requests.
            seconds: duration of the step.
        """
        return seconds / self.usual_seconds(num_requests, context)

    def goodput(self, num_requests: int, context: int) -> float:
        """λ, tokens per second: of recent steps, but at least that of no speculation.

        Args:
            num_requests: number of requests that gain tokens in the step.
            context: tokens of context, summed over the requests.
        """
        record = self._record(num_requests)
        alone = self.usual_seconds(num_requests, context) * record.correction
        return num_requests / alone * max(record.gain, 1.0)

    def observe(
        self,
        num_requests: int,
        context: int,
        num_verified: int,
        num_tokens: float,
        times: StepTimes,
    ) -> None:
        """Record a step that processed no prompts.

        A step's duration includes learning from the offers of the step before. So only steps that
        follow a step of their own kind are recorded.

        Args:
            num_requests: number of requests that gained tokens.
            context: tokens of context, summed over the requests.
            num_verified: number of verified tokens.
            num_tokens: number of gained tokens, weighted by their value.
            times: durations of the step's parts.
        """
        if not self._is_second:
            return
        record = self._record(num_requests)
        alone = self.usual_seconds(num_requests, context)
        expected = self.usual_seconds(num_requests + num_verified, context) / alone
        usual = expected * record.correction
        # A pause of the machine is not a property of the step.
        slowdown = min(max(times.total / alone, usual / _MOST_UNUSUAL), usual * _MOST_UNUSUAL)
        others = (times.draft + times.companion + times.select) / alone
        if not self.looks_now:
            record.observe_rest(slowdown, others)
            return
        record.observe_look(num_requests, num_tokens, slowdown)
        if record.is_known:
            record.observe_added(expected - 1.0, slowdown - others if num_verified else None)

    def _record(self, num_requests: int) -> OfferRecord:
        return self._records.setdefault((self.kind, batch_bucket(num_requests)), OfferRecord())

    def _nearest_known(self, num_requests: int, kind: StepKind) -> OfferRecord | None:
        """Of the records whose gain is known, that of the nearest batch size; ``None`` if none."""
        bucket = batch_bucket(num_requests)
        known = [
            other
            for (own, other), record in self._records.items()
            if own is kind and record.is_known
        ]
        found = nearest(known, bucket)
        return None if found is None else self._records[kind, found]

    def usual_seconds(self, num_tokens: int, context: int) -> float:
        """Seconds of a step that processes ``num_tokens`` tokens, by the cost model; above 0.

        Args:
            num_tokens: number of tokens in the target's pass; without drafts one for each request.
            context: tokens of context, summed over the requests.
        """
        return max(self._latency.target_seconds(num_tokens, context), 1e-9)

    def select(self, requests: Sequence[RequestState], values: Floats, context: int) -> Integers:
        """``[batch]`` number of offered tokens of each request that are worth verifying.

        Args:
            requests: the requests of the step, with their offers.
            values: ``[batch]`` seconds that an accepted token saves.
            context: tokens of context, summed over the requests.
        """
        lengths = [0] * len(requests)
        num_offered = sum(len(request.offer) for request in requests)
        if not num_offered or not self.looks_now:
            return np.array(lengths, dtype=np.int64)
        curve = self._latency.target_curve(len(requests) + num_offered, context)[len(requests) :]
        curve = curve[0] + (curve - curve[0]) * self._excess(len(requests))
        # The last selected token is worth more than it adds, so tokens worth less than any token
        # adds are left out.
        least = max(0.0, float(np.diff(curve).min()))
        tokens: list[tuple[float, int]] = []
        for row, (request, worth) in enumerate(zip(requests, values.tolist(), strict=True)):
            for probability in request.offer:
                worth *= probability
                if worth <= least:
                    break
                tokens.append((worth, row))
        # A token is worth less than those before it, so a prefix of each offer is selected.
        tokens.sort(key=itemgetter(0), reverse=True)
        saved = accumulate((worth for worth, _ in tokens), initial=float(curve[0]))
        gains = [worth - cost for worth, cost in zip(saved, curve.tolist(), strict=False)]
        for _, row in tokens[: gains.index(max(gains))]:
            lengths[row] += 1
        return np.array(lengths, dtype=np.int64)

    def grow_trees(self, level: TreeLevel, num_requests: int, context: int) -> NDArray[np.bool_]:
        """``[nodes]`` which nodes of token trees get children, by another pass of the draft model.

        A node is worth its value times the probability that one of its children is right, times the
        time that an accepted token saves, minus what one more token adds to the target's pass. The
        pass is made if together the nodes are worth more than it costs.

        Args:
            level: the nodes.
            num_requests: number of requests that gain tokens in the step.
            context: tokens of context, summed over the requests.
        """
        latency = self._latency
        added = self._added(num_requests, level.num_nodes, context)
        gained = level.values * level.coverage / self.goodput(num_requests, context)
        worth = np.maximum(gained - added, 0.0)
        # A pass takes nearly as long with fewer nodes. So they are left out only if worthless.
        grows: NDArray[np.bool_] = worth > 0
        cost = latency.tree_draft_seconds(int(grows.sum()))
        if level.depth == 0:
            cost += latency.first_tree_draft_extra
        if float(worth.sum()) <= cost:
            grows[:] = False
        return grows

    def least_node_value(self, num_requests: int, num_nodes: int, context: int) -> float:
        """Probability to be accepted at which a node saves as much time as it adds.

        Args:
            num_requests: number of requests that gain tokens in the step.
            num_nodes: number of nodes so far.
            context: tokens of context, summed over the requests.
        """
        goodput = self.goodput(num_requests, context)
        return self._added(num_requests, num_nodes, context) * goodput

    def _added(self, num_requests: int, num_nodes: int, context: int) -> float:
        """Seconds that one more node of a token tree adds to the target's pass."""
        seconds = self._latency.marginal_tree_seconds(num_requests + num_nodes, context)
        return seconds * self._excess(num_requests)

    def _excess(self, num_requests: int) -> float:
        """What verified tokens add to a step, relative to the cost model.

        Steps beside a draft model and steps with its trees do not measure it. It is a property of
        the target's pass, so they have that of the nearest batch size at which no model drafted.
        """
        record = self._record(num_requests)
        if not record.is_known:
            record = self._nearest_known(num_requests, StepKind.ALONE) or record
        return record.excess
