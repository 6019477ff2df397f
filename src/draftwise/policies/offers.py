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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate
from operator import itemgetter, mul

import numpy as np
from numpy.typing import NDArray

from draftwise.core.latency import LatencyModel
from draftwise.core.types import StepTimes
from draftwise.policies.inputs import RequestState, TreeLevel
from draftwise.policies.nearest import batch_bucket, nearest

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Weight of a step's goodput relative to the step after it.
_FORGETTING = 0.97
# Of so many steps, two look for nothing: often while it is not certain that offers pay, and rarely
# if they gain much, by more than this factor.
_UNCERTAIN_REST_EVERY, _REST_EVERY, _RARELY, _MUCH = 8, 24, 80, 1.3
# Where offers do not pay, they are looked for in two of so many steps.
_LOOK_EVERY = 20
# Number of steps without offers after which their time is known.
_MIN_RESTS = 3
# A request's remaining number of steps varies by this factor times its square root.
_SPREAD = 0.6
# Weight of a step's offer in the rate at which a request can gain tokens.
_RATE_WEIGHT = 0.1
# Weight of the cost model where little was measured, in steps whose duration offers double.
_EXCESS_PRIOR = 1.0
# Standard deviation of a step's duration, relative to its mean.
_SPREAD_OF_SECONDS = 0.05
# Durations are clipped to this factor around the usual one.
_MOST_UNUSUAL = 3.0
# What tokens add is at least and at most this factor times the cost model's.
_EXCESS_RANGE = (0.5, 2.0)


class StepKind(Enum):
    """How the requests of a step draft that use no offer. Each kind has its own records."""

    ALONE = auto()  # not at all
    BESIDE_MODEL = auto()  # with a draft model, where that pays
    TREES = auto()  # token trees of a model, with offers as branches, or of offers alone


class OfferPricing:
    """Selects offered tokens over the whole batch by prices, and learns the goodput.

    Attributes:
        kind: kind of the current step.
    """

    def __init__(self, latency: LatencyModel) -> None:
        """Set up.

        Args:
            latency: costs of passes.
        """
        self._latency = latency
        self._records: dict[tuple[StepKind, int], _Record] = {}
        self._rates: dict[int, float] = {}
        self.kind = StepKind.ALONE
        self._looks = self._is_second = True
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
                period = _RARELY if known.gain > _MUCH else _REST_EVERY
            looks = record.num_steps % period < period - 2
        if not self._is_second:
            # A change lasts for two steps at least, also if the batch size changes.
            looks = self._looks
        self._is_second = looks == self._looks and not self._is_interrupted
        self._looks, self._is_interrupted = looks, False
        return looks

    def always_look(self, kind: StepKind = StepKind.BESIDE_MODEL) -> None:
        """Begin a step of which :meth:`looks` is not asked, because a draft model runs anyway."""
        changed = kind is not self.kind
        self.kind = kind
        self._looks = True
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
            num_tokens: number of gained tokens, weighted by :meth:`weights`.
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
        if self._looks:
            record.observe_look(num_requests, num_tokens, slowdown)
            if not record.is_known:
                return
            record.expected *= _FORGETTING
            record.added *= _FORGETTING
            if num_verified:
                # Without the search and the selection, which hardly depend on the number of tokens.
                record.expected += expected - 1.0
                # A draft model may read tokens in both kinds of steps.
                record.added += slowdown - others - (record.slowdown - record.others)
        else:
            record.num_rests += 1
            # A mean over all of them at first, and over recent ones later.
            weight = max(1 / record.num_rests, 1 - _FORGETTING)
            record.slowdown += weight * (slowdown - record.slowdown)
            record.others += weight * (others - record.others)

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        for request_id in request_ids:
            self._rates.pop(request_id, None)

    def _record(self, num_requests: int) -> _Record:
        return self._records.setdefault((self.kind, batch_bucket(num_requests)), _Record())

    def _nearest_known(self, num_requests: int, kind: StepKind) -> _Record | None:
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

    def weights(self, requests: Sequence[RequestState], context: int) -> Floats:
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
        """
        count = len(requests)
        if count < 2 or not all(request.expected_remaining for request in requests):
            return np.ones(count)
        rates = [self._rate(request) for request in requests]
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

    def _rate(self, request: RequestState) -> float:
        """Tokens per step that a request can gain: by its recent offers, or this one if more."""
        rate = self._rates.get(request.request_id, 1.0)
        if not self._looks:
            return rate
        possible: float = 1.0 + sum(accumulate(request.offer, mul))
        rate += _RATE_WEIGHT * (possible - rate)
        self._rates[request.request_id] = rate
        return max(rate, possible)

    def select(self, requests: Sequence[RequestState], values: Floats, context: int) -> Integers:
        """``[batch]`` number of offered tokens of each request that are worth verifying.

        Args:
            requests: the requests of the step, with their offers.
            values: ``[batch]`` seconds that an accepted token saves.
            context: tokens of context, summed over the requests.
        """
        lengths = [0] * len(requests)
        num_offered = sum(len(request.offer) for request in requests)
        if not num_offered or not self._looks:
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


@dataclass
class _Record:
    """Recent steps of similar batch sizes, relative to the cost model.

    Attributes:
        num_looks, num_requests, tokens: sums over steps that looked for offers: their number, their
            requests, and the tokens that they gained.
        squares: sum of the squares of the tokens of each step, divided by its number of requests.
        tokens_alone: tokens that the same time would have gained without offers, by the cost model.
        num_rests: number of steps that did not look for offers.
        slowdown: their mean duration, relative to the cost model's.
        others: mean duration of their parts before the target's pass, relative to the same.
        num_steps: number of steps of both kinds.
        expected, added: what verified tokens were expected to add to steps, and what they added,
            relative to steps without offers; sums over steps.
    """

    num_looks: float = 0.0
    num_requests: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    tokens_alone: float = 0.0
    num_rests: int = 0
    slowdown: float = 0.0
    others: float = 0.0
    num_steps: int = 0
    expected: float = 0.0
    added: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the duration of a step without offers is known."""
        return self.num_rests >= _MIN_RESTS

    @property
    def correction(self) -> float:
        """Factor of the cost model's duration of a step without offers; 1 until it is known."""
        return self.slowdown if self.is_known else 1.0

    @property
    def excess(self) -> float:
        """What verified tokens add to a step, relative to the cost model."""
        ratio = (self.added + _EXCESS_PRIOR) / (self.expected + _EXCESS_PRIOR)
        return min(max(ratio, _EXCESS_RANGE[0]), _EXCESS_RANGE[1])

    @property
    def gain(self) -> float:
        """Goodput of steps that looked for offers, relative to the others; 1 without any."""
        return self.tokens * self.correction / self.tokens_alone if self.tokens_alone else 1.0

    @property
    def loses(self) -> bool:
        """Whether looking for offers is a loss, even if the gain is two standard errors higher.

        The duration of a step without offers must be known.
        """
        if not self.num_looks:
            return False
        mean = self.tokens / self.num_requests
        variance = max(self.squares / self.num_requests - mean**2, 0.0) / mean**2
        # Where no token was accepted so far, the next one may be.
        of_tokens = max(math.sqrt(variance / self.num_looks), 1.0 / self.num_requests)
        num_rests = min(self.num_rests, 1.0 / (1.0 - _FORGETTING))
        of_seconds = _SPREAD_OF_SECONDS * math.sqrt(1.0 / self.num_looks + 1.0 / num_rests)
        error = math.hypot(of_tokens, of_seconds)
        return self.gain * (1.0 + 2.0 * error) < 1.0

    def observe_look(self, num_requests: int, num_tokens: float, slowdown: float) -> None:
        """Add a step that looked for offers.

        Args:
            num_requests: its number of requests.
            num_tokens: number of gained tokens.
            slowdown: its duration, relative to one without offers by the cost model.
        """
        self.num_looks = _FORGETTING * self.num_looks + 1.0
        self.num_requests = _FORGETTING * self.num_requests + num_requests
        self.tokens = _FORGETTING * self.tokens + num_tokens
        self.squares = _FORGETTING * self.squares + num_tokens**2 / num_requests
        self.tokens_alone = _FORGETTING * self.tokens_alone + num_requests * slowdown
