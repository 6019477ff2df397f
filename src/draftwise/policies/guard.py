"""The guard of every policy: drafts may lose at most one step, and one per cent of the time.

A :class:`Guard` keeps an account in steps without drafts. The account begins with one step. Every
step adds one per cent, and what its drafts saved (:mod:`draftwise.policies.makespan`). Drafts are
shortened until the account covers the time of the step in the case that no drafted token is
accepted. Continuations are looked for if the account covers that and one token more. So if step
times are estimated correctly, the loss over any run against no speculation is at most one step and
one per cent. The rule is that of conservative bandits (Wu et al. 2016, arXiv 1602.04282).

The estimates need steps without drafts, with which others are compared. The first two steps at a
batch size are such steps. Another one follows as soon as a fixed share of the time has paid for
what it is expected to lose.

Preparing passes of new sizes, which happens once, is not charged to the account.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from statistics import median

import numpy as np
from numpy.typing import NDArray

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import Outcome
from draftwise.core.types import StepTimes as MeasuredTimes
from draftwise.policies.inputs import RequestState
from draftwise.policies.makespan import Makespan
from draftwise.policies.step_times import COPIES, SCORED, TREES, StepTimes

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]
Integers = NDArray[np.int64]

# In steps without drafts: what the account begins with, what every step adds, and the most that is
# kept, so that long savings do not pay for long losses.
_START, _INCOME, _MOST = 1.0, 0.01, 16.0
# As long as few steps of a kind were measured, a pause of the machine counts up to this multiple of
# the expected time.
_LONGEST_PAUSE = 1.25
# Share of the time that pays for measuring steps without drafts again.
_REFERENCE_SHARE = 0.0025
# Steps without drafts at a batch size before anything is drafted.
_FIRST_STEPS = 2
# Weight of a step in what drafts gain on average.
_GAIN_WEIGHT = 1 / 32
# Steps whose median is the usual time between two steps.
_USUAL_STEPS = 15
# Without a draft model, drafting takes no time.
_FREE = StageCost((1.0,), (0.0,))


class Bucket:
    """What is known at similar batch sizes.

    Attributes:
        times: of steps.
        since_none: steps since the last one without drafts.
        tokens, seconds: mean tokens of a request and mean time of a step with drafts, relative to a
            step without drafts.
    """

    def __init__(self) -> None:
        """Begin without observations."""
        self.times = StepTimes()
        self.since_none = 0
        self.tokens = self.seconds = 1.0


class Guard:
    """Estimates what steps take, and keeps the account.

    Attributes:
        enabled: whether drafts are shortened. Otherwise only the times are learnt.
        balance: of the account, in steps without drafts.
        requests: the requests of the step.
        looked: whether the step looks for continuations, without a draft model.
        scored: whether a companion scores the step's draft.
        bucket: what is known at the step's batch size.
        computed_alone: seconds of the step without drafts by the profiled costs.
    """

    def __init__(self, latency: LatencyModel, enabled: bool = True) -> None:
        """Set up.

        Args:
            latency: has the profiled costs of passes.
            enabled: see above.
        """
        self.enabled = enabled
        self.balance = _START
        self._latency = latency
        self._buckets: dict[int, Bucket] = {}
        self._makespan: Makespan | None = None
        self._between_steps: deque[float] = deque(maxlen=_USUAL_STEPS)
        # Seconds of the latest step, and of a step without drafts.
        self._latest: tuple[float, float] | None = None
        self.begin(())

    @property
    def target(self) -> StageCost:
        """Profiled cost of the target's pass."""
        return self._latency.target

    @property
    def draft(self) -> StageCost:
        """Profiled cost of the draft's pass."""
        return self._latency.draft or _FREE

    def begin(self, requests: Sequence[RequestState]) -> None:
        """Begin a step. Calling it again changes nothing."""
        self.requests = requests
        self.looked = self.scored = False
        size = len(requests)
        self._context = sum(request.num_tokens for request in requests)
        self.computed_alone = self.target(size, self._context)
        key = bucket_key(size)
        if key not in self._buckets:
            self._buckets[key] = Bucket()
        self.bucket = self._buckets[key]
        self._makespan = None

    @property
    def makespan(self) -> Makespan:
        """The worth of tokens that the step gains."""
        if self._makespan is None:
            self._makespan = Makespan(self.requests, self.target)
        return self._makespan

    # What steps take.

    def computed(self, lengths: Integers, by_model: Booleans, num_scored: int = 0) -> float:
        """:meth:`computed_work` of a step in which all drafted tokens are verified.

        Args:
            lengths: ``[batch]`` number of drafted tokens.
            by_model: ``[batch]`` whether the model drafts them.
            num_scored: number of tokens that the companion scores.
        """
        rows = len(lengths) + int(lengths.sum())
        return self.computed_work(rows, np.where(by_model, lengths, 0), num_scored)

    def computed_work(self, num_rows: int, drafted: Integers, num_scored: int) -> float:
        """Seconds of a step by the profiled costs of its passes.

        Args:
            num_rows: number of tokens that the target reads.
            drafted: ``[batch]`` number of tokens that the model drafts.
            num_scored: number of tokens that the companion scores.
        """
        seconds = self.target(num_rows, self._context)
        longest = int(drafted.max(initial=0))
        if longest:
            draft = self.draft
            counts = (drafted[:, None] > np.arange(longest)).sum(axis=0).tolist()
            seconds += draft.first_extra
            seconds += sum(draft(count) * len(list(same)) for count, same in groupby(counts))
            pairs = zip(self.requests, drafted.tolist(), strict=True)
            behind = sum(request.num_behind for request, own in pairs if own)
            seconds += slope(draft, len(drafted)) * behind
        if num_scored and self._latency.companion is not None:
            seconds += self._latency.companion(num_scored)
        return seconds

    @property
    def alone(self) -> float:
        """Expected seconds of a step without drafts."""
        return self.computed_alone * self.bucket.times.factor(0)

    def affords(self, seconds: float) -> bool:
        """Whether the account covers a step in the case that no drafted token is accepted."""
        return not self.enabled or seconds / self.alone - 1.0 <= self.balance

    def affords_looking(self) -> bool:
        """Whether the account covers looking for a continuation and verifying one token of it."""
        if not self.enabled:
            return True
        kind = COPIES if self.bucket.times.weight(COPIES) else 0
        seconds = self.target(len(self.requests) + 1, self._context)
        return self.affords(seconds * self.bucket.times.factor(kind))

    def rests(self, prices: bool) -> bool:
        """Whether the step should draft nothing, so that its time can be compared with others.

        Args:
            prices: whether a policy needs the comparison, even if the guard is not enabled.
        """
        bucket = self.bucket
        if not (self.enabled or prices):
            return False
        if bucket.times.num_steps < _FIRST_STEPS:
            return True
        loss = abs(1 - bucket.seconds / bucket.tokens)
        return bucket.since_none > 0 and bucket.since_none * _REFERENCE_SHARE >= loss

    # What policies may draft.

    def shortened(
        self, lengths: Sequence[int], by_model: Sequence[bool], scored: bool, trees: bool
    ) -> list[int]:
        """The longest affordable drafts, cut to a common length.

        Args:
            lengths: ``[batch]`` draft lengths that a policy has chosen.
            by_model: ``[batch]`` whether the model drafts them.
            scored: whether the companion scores them.
            trees: whether they are numbers of nodes in token trees.
        """
        wanted = list(lengths)
        if not self.enabled or not any(wanted):
            return wanted
        most, model = np.array(wanted, np.int64), np.array(by_model, bool) & (not trees)
        for longest in range(max(wanted), 0, -1):
            own = np.minimum(most, longest)
            num_scored = int(own.sum()) if scored else 0
            kind = _kind(own, model, trees) + SCORED * scored
            seconds = self.computed(own, model, num_scored) * self.bucket.times.factor(kind)
            if self.affords(seconds):
                shortened: list[int] = own.tolist()
                return shortened
        return [0] * len(wanted)

    # Learning.

    def observe(self, outcome: Outcome, times: MeasuredTimes) -> None:
        """Learn from a step, and settle the account."""
        self._latest = None
        size = len(self.requests)
        if not size or len(outcome.num_verified) != size:
            return
        if not any(outcome.num_drafted) and not self.looked:
            self._observe_alone(times)
            return
        drafted = np.array(outcome.num_drafted, np.int64)
        copied = np.array(outcome.is_copied or (False,) * size, bool)
        trees = outcome.paths is not None
        model = ~copied & (not trees) & np.array([r.has_model for r in self.requests], bool)
        # Without drafts, the time still contains looking for continuations.
        kind = _kind(drafted, model, trees) or COPIES
        rows = size + sum(outcome.num_verified)
        by_model = np.where(model, drafted, 0)
        num_scored = int(by_model.sum()) if self.scored else 0
        computed = self.computed_work(rows, by_model, num_scored)
        kind += SCORED * (num_scored > 0)
        bucket = self.bucket
        expected = computed * bucket.times.factor(kind)
        seconds = self._seconds_of_drafts(times)
        if times.is_typical and seconds > 0:
            bucket.times.observe(kind, seconds / computed)
        alone = self.alone
        bucket.since_none += 1
        if bucket.times.is_known(kind):  # a pause of the machine is not due to the draft
            taken = computed * bucket.times.factor(kind)
        else:
            taken = min(seconds, _LONGEST_PAUSE * expected) if times.is_typical else expected
        taken += times.looking
        if bucket.times.has_reference:
            self._latest = taken, alone
        tokens = self.makespan.worth(1.0 + gained_tokens(outcome)) / size
        relative = taken / alone
        bucket.tokens += _GAIN_WEIGHT * (tokens - bucket.tokens)
        bucket.seconds += _GAIN_WEIGHT * (relative - bucket.seconds)
        self.settle(tokens, relative)

    def _observe_alone(self, times: MeasuredTimes) -> None:
        """The same for a step without drafts."""
        seconds = self._seconds_of_drafts(times)
        if times.is_typical and seconds > 0:
            self.bucket.times.observe(0, seconds / self.computed_alone)
        self.bucket.since_none = 0
        alone = self.alone
        taken = alone + times.looking
        self._latest = taken, alone
        self.settle(1.0, taken / alone)

    def saved(self, num_tokens: int) -> float | None:
        """Seconds that the drafts of the latest step saved for one of its requests.

        They are the time that its tokens would have taken without drafts, less the time of the
        step. ``None`` if no step without drafts was measured at this batch size.

        Args:
            num_tokens: number of tokens that the request gained.
        """
        if self._latest is None:
            return None
        taken, alone = self._latest
        return num_tokens * alone - taken

    def _seconds_of_drafts(self, times: MeasuredTimes) -> float:
        """Time of a step without looking for copies, and with the usual time between steps.

        Requests that join or end take time between steps, whatever is drafted.
        """
        self._between_steps.append(times.rest)
        usual = min(times.rest, median(self._between_steps))
        return times.total - times.rest + usual - times.looking

    def settle(self, tokens: float, seconds: float) -> None:
        """Add to the account what a step saved.

        Args:
            tokens: worth of the gained tokens for each request.
            seconds: its time, relative to that of a step without drafts.
        """
        self.balance = min(self.balance + _INCOME + tokens - seconds, _MOST)


def _kind(lengths: Integers, by_model: Booleans, trees: bool) -> int:
    """The kind of a step; see :mod:`draftwise.policies.step_times`."""
    if not lengths.any():
        return 0
    if trees:
        return TREES
    return int(np.where(by_model, lengths, 0).max()) or COPIES


def gained_tokens(outcome: Outcome) -> Floats:
    """``[batch]`` accepted tokens of each request: their expectation where it is known."""
    if outcome.prefix_acceptance_prob is None or outcome.paths is not None:
        return np.array(outcome.num_accepted, np.float64)
    kept: Floats = outcome.prefix_acceptance_prob.sum(dim=1).cpu().double().numpy()
    return kept


def bucket_key(size: int) -> int:
    """The same number for similar batch sizes: above 2, the nearest power of two."""
    return size if size <= 2 else 1 << round(math.log2(size))


def slope(cost: StageCost, size: float) -> float:
    """Seconds of one more token in a pass, over the next quarter of its size."""
    more = 0.25 * size + 1
    return (cost(size + more) - cost(size)) / more
