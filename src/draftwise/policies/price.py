"""One price for all drafts of a step: the choice with the best expected goodput is taken.

A step in which the model drafts k tokens is expected to gain ``tokens(k) = B + Σ_b Σ_{i≤k} S_i``
tokens for B requests. S_i is the survival: the probability that the first i drafted tokens are
accepted, from earlier steps. The step takes ``seconds(k)``: the profiled costs of its passes,
corrected by measured times (:mod:`draftwise.policies.step_times`). Its goodput is tokens(k) over
seconds(k).

A request can also copy a continuation whose acceptance is estimated before the step. The goodput λ
of the batch is the value of a second, so a verified token costs λ times the seconds that it adds.
Copied tokens are verified while their survival exceeds that price. A request drafts with the model
where this gains more than its copies, both after their price.

A length that may be better is tried as soon as a fixed share of the goodput has paid for the
expected loss. The guard (:mod:`draftwise.policies.guard`) covers every step.

All of this uses earlier steps, and estimates of copies, never what a model has drawn. So the drafts
satisfy the first condition of :mod:`draftwise.policies.base`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import Outcome
from draftwise.core.types import StepTimes as MeasuredTimes
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.guard import Booleans, Guard, Integers, bucket_key, slope
from draftwise.policies.inputs import RequestState
from draftwise.policies.step_times import COPIES

Floats = NDArray[np.float64]

# Draft lengths to choose from, and the maximum. More of them gain nothing, and each takes time to
# be measured.
LENGTHS = (1, 2, 3, 5, 7, 11)
# Acceptance at a position before any token of it was tested, and its weight in tested tokens.
_GUESS, _GUESS_TOKENS = 0.6, 4.0
# Drafts after which an observed acceptance has lost most of its weight.
_MEMORY = 256
# Share of the goodput that pays for trials of other lengths.
_TRIAL_SHARE = 0.004
# Relative uncertainty of the goodput of a length that was measured in one step.
_UNCERTAINTY = 0.4
# Steps over which preparing passes of a new size must pay.
_HORIZON = 128
# Weight of a step in the mean gain of looking for continuations.
_LOOKING_WEIGHT = 1 / 32


class _Memory:
    """What is known at similar batch sizes, beside the times.

    Attributes:
        rate: the goodput λ of the latest choice, in tokens per second; 0 before any.
        num_extra: tokens of its target pass beyond one for each request.
        since_trial, since_look: steps since a trial, and since continuations were looked for.
        looking: mean logarithm of how much looking for continuations increases the goodput.
    """

    def __init__(self) -> None:
        """Begin without observations."""
        self.rate = self.num_extra = self.looking = 0.0
        self.since_trial = self.since_look = 0


class Choice(NamedTuple):
    """A way to draft in the coming step.

    Attributes:
        kind: of the step; see :mod:`draftwise.policies.step_times`.
        lengths: ``[batch]`` number of drafted or copied tokens.
        by_model: ``[batch]`` whether the model drafts them.
        tokens: expected worth of the gained tokens.
        computed: seconds by the profiled costs.
    """

    kind: int
    lengths: Integers
    by_model: Booleans
    tokens: float
    computed: float


class Copies(NamedTuple):
    """What requests would copy.

    Attributes:
        lengths: ``[batch]`` number of tokens.
        kept: ``[batch]`` expected number of accepted ones.
    """

    lengths: Integers
    kept: Floats


class Adaptive(Policy):
    """Takes the draft length, or the copies, with the best expected goodput.

    Attributes:
        lengths: the draft lengths of the model that it chooses from.
    """

    name = "adaptive"
    summary = "the draft length with the best expected goodput"
    source = "this project"
    signals = frozenset({Signal.LOAD, Signal.HISTORY})
    needs_latency = True

    def __init__(self, context: PolicyContext) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model is required.
        """
        super().__init__(context)
        assert context.latency is not None
        gamma = context.num_speculative_tokens
        self.lengths = [*(length for length in LENGTHS if length < gamma), gamma]
        # For a part of the batch, whose steps are not measured.
        self._of_a_part = Guard(context.latency, enabled=False)
        self._accepted, self._tested = np.zeros(gamma), np.zeros(gamma)
        self._memories: dict[int, _Memory] = {}
        self._preparing = 0.0
        self._looks = False
        self._begin(())

    # What is drafted.

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether copies have gained more than looking for them costs, or are to be tried."""
        if requests:
            memory = self._memory_of(len(requests))
            self._looks = (memory.since_look + 1) * _TRIAL_SHARE >= -memory.looking
        return self._looks

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """The best choice. Every request copies, or drafts with the model, by one price."""
        self._begin(requests)
        looked = self._looks or any(request.offer for request in requests)
        self._looks = False
        if looked or any(request.has_model for request in requests):
            self._take(self._with_copies() if looked else self._alone())
        return DraftPlan(self._choice.lengths.tolist(), (~self._choice.by_model).tolist())

    def _alone(self) -> list[Choice]:
        """The choices without copies."""
        return [self._none, *self._drafts(self._no_copies)]

    def _with_copies(self) -> list[Choice]:
        """All choices, after looking for continuations. Learn what they gain."""
        memory = self._memory
        memory.since_look = 0
        choices, copies = self._alone(), self._copies()
        gained = max(map(self._rate, choices))
        if len(choices) == 1:  # without a model, the time of a step contains looking
            choices = [self._none._replace(kind=COPIES)]
            if copies.lengths.any():
                choices.append(self._copying(copies))
        elif copies.lengths.any():
            choices = [self._none, self._copying(copies), *self._drafts(copies)]
        gain = math.log(max(map(self._rate, choices)) / gained)
        memory.looking += _LOOKING_WEIGHT * (gain - memory.looking)
        return choices

    def _begin(self, requests: Sequence[RequestState]) -> None:
        """Begin a step without drafts."""
        size = len(requests)
        self._requests = requests
        self._costs = self.guard or self._of_a_part
        if self._costs.requests is not requests:
            self._costs = self._of_a_part
            self._costs.begin(requests)
        nobody, nothing = np.zeros(size, bool), np.zeros(size, np.int64)
        self._choice = self._none = Choice(
            0, nothing, nobody, float(size), self._costs.computed_alone
        )
        self._no_copies = Copies(nothing, np.zeros(size))
        if size:
            self._memory = self._memory_of(size)
            self._memory.since_trial += 1
            self._memory.since_look += 1

    def _memory_of(self, size: int) -> _Memory:
        return self._memories.setdefault(bucket_key(size), _Memory())

    # What a choice gains and takes.

    def survival(self) -> Floats:
        """``[γ]`` probability that each position is reached and accepted."""
        acceptance, before = np.empty(len(self._tested)), _GUESS
        for place, (accepted, tested) in enumerate(zip(self._accepted, self._tested, strict=True)):
            before = (accepted + _GUESS_TOKENS * before) / (tested + _GUESS_TOKENS)
            acceptance[place] = before
        return acceptance.cumprod()

    def _drafts(self, copies: Copies) -> list[Choice]:
        """The choices in which the model drafts, by their lengths."""
        requests, size, gamma = self._requests, len(self._requests), self.num_speculative_tokens
        limits = np.array([min(r.draft_limit, gamma) if r.has_model else 0 for r in requests])
        if not limits.any():
            return []
        behind = np.array([request.num_behind for request in requests])
        gained = np.concatenate([[0.0], self.survival().cumsum()])
        draft_row = self._second * slope(self._costs.draft, size)
        copied = copies.kept - self._row_price * copies.lengths
        choices = []
        for length in self.lengths:
            own = np.minimum(length, limits)
            worth = gained[own] - self._row_price * own - draft_row * behind
            by_model = (own > 0) & ((copies.lengths == 0) | (worth > copied))
            if not by_model.any():
                continue
            lengths = np.where(by_model, own, copies.lengths)
            tokens = self._costs.makespan.worth(1.0 + np.where(by_model, gained[own], copies.kept))
            computed = self._costs.computed(lengths, by_model)
            kind = int(own[by_model].max())
            choices.append(Choice(kind, lengths, by_model, tokens, computed))
        return choices

    def _copying(self, copies: Copies) -> Choice:
        """The choice in which the model drafts nothing."""
        computed = self._costs.computed(copies.lengths, self._none.by_model)
        tokens = self._costs.makespan.worth(1.0 + copies.kept)
        return Choice(COPIES, copies.lengths, self._none.by_model, tokens, computed)

    def _copies(self) -> Copies:
        """The copied tokens that are worth their price.

        Without a draft model, they are those that maximise the goodput of the batch.
        """
        size, gamma = len(self._requests), self.num_speculative_tokens
        reach = [
            list(accumulate(request.offer[: min(gamma, request.draft_limit)], mul))
            for request in self._requests
        ]
        if any(request.has_model for request in self._requests):
            price = self._row_price
        else:
            context = sum(request.num_tokens for request in self._requests)
            values = sorted(chain.from_iterable(reach), reverse=True)
            gained = accumulate(values, initial=float(size))
            goodput = [g / self._costs.target(size + n, context) for n, g in enumerate(gained)]
            best = goodput.index(max(goodput))
            price = values[best - 1] if best else math.inf
        kept = [[value for value in own if value >= price] for own in reach]
        return Copies(np.array(list(map(len, kept)), np.int64), np.array(list(map(sum, kept))))

    @property
    def _second(self) -> float:
        """Value of a second of profiled time, in tokens."""
        factor = self._costs.bucket.times.factor(0)
        return self._memory.rate * factor or len(self._requests) / self._none.computed

    @property
    def _row_price(self) -> float:
        """Price of one more token in the target's pass, in tokens."""
        return self._second * slope(
            self._costs.target, len(self._requests) + self._memory.num_extra
        )

    def _seconds(self, choice: Choice) -> float:
        """Expected seconds of a step."""
        return choice.computed * self._costs.bucket.times.factor(choice.kind)

    def _rate(self, choice: Choice) -> float:
        """Expected goodput of a step, in tokens per second."""
        return choice.tokens / self._seconds(choice)

    def _take(self, choices: Sequence[Choice]) -> None:
        """Take the best affordable choice, or one that is to be measured."""
        memory, times = self._memory, self._costs.bucket.times
        usable = [choice for choice in choices if self._costs.affords(self._seconds(choice))]
        choices = usable or choices[:1]
        rates = [self._rate(choice) * self._share_left(choice) for choice in choices]
        best = chosen = int(np.argmax(rates))
        memory.rate = rates[best]
        hopeful = [
            rate * (1 + _UNCERTAINTY / math.sqrt(1 + times.weight(choice.kind)))
            for rate, choice in zip(rates, choices, strict=True)
        ]
        hopeful[best] = 0.0
        other = int(np.argmax(hopeful))
        if hopeful[other] > rates[best]:
            loss = 1 - rates[other] / rates[best]
            loss += 0.0 if times.weight(choices[other].kind) else self._preparing
            if memory.since_trial * _TRIAL_SHARE >= loss:
                chosen, memory.since_trial = other, 0
        self._choice = choices[chosen]
        memory.num_extra = float(self._choice.lengths.sum())

    def _share_left(self, choice: Choice) -> float:
        """What preparing passes of a new size leaves of the goodput."""
        if not choice.kind or self._costs.bucket.times.weight(choice.kind):
            return 1.0
        return 1 / (1 + self._preparing / _HORIZON)

    # Learning.

    def observe(self, outcome: Outcome, times: MeasuredTimes) -> None:
        """Learn acceptance, and what preparing takes."""
        if not self._requests:
            return
        if times.looking:  # beside a draft model
            cost = math.log1p(times.looking / self._seconds(self._choice))
            self._memory.looking -= _LOOKING_WEIGHT * cost
        if outcome.prefix_acceptance_prob is None:
            return
        if times.prepared and not times.num_prompt_tokens:
            extra = max(0.0, times.total / self._costs.alone - 1.0)
            self._preparing += (extra - self._preparing) / 2
        if not any(outcome.num_drafted):
            return
        kept = outcome.prefix_acceptance_prob.cpu().double().numpy()
        kept, drafted = self._probabilities(outcome, kept)
        drafted[list(outcome.failed)] = False
        if not drafted.any():
            return
        width = kept.shape[1]
        tested = reached(kept) * drafted
        decay = max(0.0, 1 - drafted[:, 0].sum() / _MEMORY)
        for sums, new in ((self._accepted, kept * drafted), (self._tested, tested)):
            sums *= decay
            sums[:width] += new.sum(axis=0)

    def _probabilities(self, outcome: Outcome, kept: Floats) -> tuple[Floats, Booleans]:
        """``[batch, width]`` probabilities to be accepted, and which of them are learnt from.

        Only drafts of the model are learnt from. The acceptance of copies is estimated where they
        are found.

        Args:
            outcome: of the step.
            kept: ``[batch, width]`` probabilities of the verified tokens.
        """
        known = np.arange(kept.shape[1]) < np.asarray(outcome.known_lengths)[:, None]
        return kept, known & self._choice.by_model[:, None]


def reached(kept: Floats) -> Floats:
    """``[batch, width]`` probability that each position is reached.

    Args:
        kept: ``[batch, width]`` probability that the token there and all before it are accepted.
    """
    return np.concatenate([np.ones((len(kept), 1)), kept[:, :-1]], axis=1)
