"""The goodput of deciding by a signal: what is drafted and verified, by one price.

A decision rule has three numbers. A draft has at most ``length`` tokens. It ends after a token with
which the estimated survival, the probability that all tokens so far are accepted, falls below
``stop``. A drafted token is verified while the estimated survival, its own included, reaches
``keep``. This is the rule of :mod:`draftwise.policies.price` and :mod:`draftwise.policies.sv`:
``keep`` is the price of a row of the target's pass in tokens, and ``stop`` that of a drafted token.
The numbers are those with the highest goodput on other prompts, among a few values of each. So no
price has to be learnt while it is used, and a rule that looks at nothing is a static draft length.

Steps are batches of recorded drafts. What a step gains is its expected number of tokens, by the
recorded acceptance probabilities. What it takes are the times of its passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftwise.core.stage_cost import StageCost
from draftwise.estimators.records import Integers
from draftwise.policies.price import LENGTHS
from draftwise.studies.signals.estimate import NUM_FOLDS, Estimate, Floats, folds
from draftwise.studies.signals.kinds import Kind, Need
from draftwise.studies.signals.pass_times import PassTimes

# Survivals among which the thresholds are chosen. 0 never stops, and verifies everything.
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# How often each recorded draft occurs in batches of more than one, on average.
_REPEATS = 4


@dataclass(frozen=True)
class Costs:
    """Seconds of the passes of a step, for every size that a batch can have.

    Attributes:
        first: ``[batch + 1]`` of the first token of the drafts, by the requests that draft.
        later: ``[batch + 1]`` of each further token.
        companion: ``[drafted + 1]`` of the companion; 0 without one.
        keep: ``[drafted + 1]`` of applying the rule to whole distributions; 0 without a filter.
        target: ``[rows + 1]`` of the target.
    """

    first: Floats
    later: Floats
    companion: Floats
    keep: Floats
    target: Floats

    @classmethod
    def of(
        cls,
        times: PassTimes,
        kind: Kind,
        companion: str | None,
        batch: int,
        length: int,
        greedy: bool,
    ) -> Costs:
        """What deciding by a kind of signal costs.

        Args:
            times: measured times.
            kind: the signals.
            companion: the companion whose pass is charged; ``None`` for none.
            batch: number of requests.
            length: maximum draft length.
            greedy: whether tokens are the most likely ones. Then no distribution is filtered.
        """
        asks = kind.need not in (Need.NOTHING, Need.TARGET)
        parts = "first", "later"
        first, later = (_curve(getattr(times.draft, p), range(batch + 1)) for p in parts)
        if not asks:  # by chance, a pass without signals may have been measured as the longer one
            without = times.draft_without_signals
            first = np.minimum(first, _curve(without.first, range(batch + 1)))
            later = np.minimum(later, _curve(without.later, range(batch + 1)))
        drafted = range(batch * length + 1)
        filtered = asks and kind.sees_token and not greedy
        return cls(
            first,
            later,
            _curve(times.companions[companion], drafted) if companion else np.zeros(len(drafted)),
            _curve(times.keep, drafted) if filtered else np.zeros(len(drafted)),
            _curve(times.target, range(batch * (length + 1) + 1)),
        )


def _curve(cost: StageCost, numbers: range) -> Floats:
    return np.array([cost(number) for number in numbers])


@dataclass(frozen=True)
class Rule:
    """A decision rule; see the module."""

    length: int
    stop: float
    keep: float


@dataclass(frozen=True)
class Total:
    """What some steps gain and take.

    Attributes:
        tokens: expected number of gained tokens.
        seconds: time of the passes.
        steps: number of steps.
        companion: time of the companion's passes.
        target: time of the target's passes.
        drafted, verified: number of tokens.
    """

    tokens: float
    seconds: float
    steps: int
    companion: float
    target: float
    drafted: float
    verified: float

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @classmethod
    def join(cls, parts: Sequence[Total]) -> Total:
        """The sum of all."""
        names = vars(parts[0])
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in names})


class Steps:
    """Batches of recorded drafts, and what rules make of them.

    Attributes:
        batch: number of requests.
    """

    def __init__(
        self, drafts: Integers, batch: int, acceptance: Floats, survival: Floats, going: Floats
    ) -> None:
        """Put drafts into batches.

        Args:
            drafts: indices of the drafts that may occur.
            batch: number of requests.
            acceptance: ``[all drafts, length]`` recorded acceptance probabilities.
            survival: ``[all drafts, length]`` estimated survival, which selects.
            going: ``[all drafts, length]`` estimated survival while the draft is written.
        """
        self.batch = batch
        order = drafts
        if batch > 1:
            count = max(1, -(-_REPEATS * len(drafts) // batch)) * batch
            order = np.random.default_rng(0).choice(drafts, count)
        gained = acceptance[order].cumprod(axis=1).cumsum(axis=1)
        self._gained = np.column_stack([np.zeros(len(order)), gained])
        self._kept = {t: (survival[order] >= t).sum(axis=1) for t in THRESHOLDS}
        # A draft goes on after a token; the token itself was drafted.
        self._going = {t: (going[order] >= t).sum(axis=1) + 1 for t in THRESHOLDS}
        self._rows = np.arange(len(order))

    def total(self, rule: Rule, costs: Costs) -> Total:
        """What all steps gain and take by a rule."""
        return self._totals(rule.length, rule.stop, [rule.keep], costs)[0]

    def _totals(
        self, length: int, stop: float, keeps: Sequence[float], costs: Costs
    ) -> list[Total]:
        """The totals of rules that draft alike and select by different thresholds."""
        drafted = np.minimum(self._going[stop], length)
        own = drafted.reshape(-1, self.batch)
        num_steps, of_step = len(own), own.sum(axis=1)
        counts = (own[:, :, None] > np.arange(length)).sum(axis=1)
        companion = float(costs.companion[of_step].sum())
        before = float(costs.first[counts[:, :1]].sum() + costs.later[counts[:, 1:]].sum())
        before += companion + float(costs.keep[of_step].sum())
        totals = []
        for keep in keeps:
            verified = np.minimum(self._kept[keep], drafted)
            rows = self.batch + verified.reshape(-1, self.batch).sum(axis=1)
            target = float(costs.target[rows].sum())
            tokens = len(drafted) + float(self._gained[self._rows, verified].sum())
            totals.append(
                Total(
                    tokens,
                    before + target,
                    num_steps,
                    companion,
                    target,
                    float(drafted.sum()),
                    float(verified.sum()),
                )
            )
        return totals

    def best(self, costs: Costs, stops: Sequence[float], keeps: Sequence[float]) -> Rule:
        """The rule with the highest goodput."""
        longest = self._gained.shape[1] - 1
        lengths = [0, *(each for each in LENGTHS if each < longest), longest]
        best, most = Rule(0, 0.0, 0.0), 0.0
        for length, stop in itertools.product(lengths, stops):
            if length == 0 and stop != stops[0]:
                continue
            totals = self._totals(length, stop, keeps, costs)
            for keep, total in zip(keeps, totals, strict=True):
                if total.goodput > most:
                    best, most = Rule(length, stop, keep), total.goodput
        return best


class Fold(NamedTuple):
    """What a rule gains and takes on the prompts that it was chosen on, and on the others."""

    known: Total
    held_out: Total


def by_fold(
    kind: Kind,
    costs: Costs,
    prompts: Integers,
    batch: int,
    acceptance: Floats,
    survival: Floats,
    going: Floats,
) -> list[Fold]:
    """Choose a rule on all folds of prompts but one, and apply it to that fold; for each fold.

    Args:
        kind: the signals that decide.
        costs: what passes cost with them.
        prompts: ``[drafts]`` prompt of each draft.
        batch: number of requests.
        acceptance, survival, going: see :class:`Steps`.
    """
    stops = THRESHOLDS if kind.while_drafting else THRESHOLDS[:1]
    keeps = THRESHOLDS if kind.columns else THRESHOLDS[:1]
    data, found = (acceptance, survival, going), []
    for known, held_out in folds(prompts, NUM_FOLDS):
        steps = Steps(np.flatnonzero(known), batch, *data)
        rule = steps.best(costs, stops, keeps)
        applied = Steps(np.flatnonzero(held_out), batch, *data).total(rule, costs)
        found.append(Fold(steps.total(rule, costs), applied))
    return found


def held_out_totals(candidates: Sequence[Sequence[Fold]]) -> list[Total]:
    """What each fold gains and takes by the candidate that is best on the other folds."""
    return [
        max(of_fold, key=lambda fold: fold.known.goodput).held_out
        for of_fold in zip(*candidates, strict=True)
    ]


def static_totals(
    length: int, costs: Costs, prompts: Integers, batch: int, acceptance: Floats
) -> list[Total]:
    """What each fold of prompts gains and takes with a fixed draft length."""
    rule, ones = Rule(length, 0.0, 0.0), np.ones_like(acceptance)
    return [
        Steps(np.flatnonzero(held_out), batch, acceptance, ones, ones).total(rule, costs)
        for _, held_out in folds(prompts, NUM_FOLDS)
    ]


def ratio(totals: Sequence[Total], others: Sequence[Total]) -> Estimate:
    """Goodput relative to another, with the standard error over the folds."""
    mean = Total.join(totals).goodput / Total.join(others).goodput
    each = [a.goodput / b.goodput for a, b in zip(totals, others, strict=True)]
    return Estimate(mean, float(np.std(each, ddof=1) / np.sqrt(len(each))))


def affordable_companion(totals: Sequence[Total], without: Sequence[Total]) -> float:
    """The longest pass of a companion that pays, relative to the target's pass.

    Args:
        totals: with a companion that takes no time.
        without: without a companion.

    Returns:
        The time per step by which the companion's signals shorten the same tokens, relative to the
        target's pass. It is below 0 if its signals lose time even if they are free.
    """
    free, alone = Total.join(totals), Total.join(without)
    return (free.tokens / alone.goodput - free.seconds) / free.target


def per_request(totals: Sequence[Total], batch: int) -> Mapping[str, float]:
    """Tokens per request and step, and the companion's time relative to the target's."""
    whole = Total.join(totals)
    requests = whole.steps * batch
    return {
        "drafted": whole.drafted / requests,
        "verified": whole.verified / requests,
        "gained": whole.tokens / requests,
        "companion_over_target": whole.companion / whole.target,
    }
