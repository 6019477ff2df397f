"""What all policies that price have in common: drafting by price, learning, exploring."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.goodput import OperatingPoint
from draftwise.core.types import Draft, Judgement, Outcome, Plan, RuleNotes, StepTimes
from draftwise.estimators.combined import SignalModel, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import DraftPosition, Policy, PolicyContext, RequestState
from draftwise.policies.filtering import Integers, Scorer, keep_in_range, keep_likely
from draftwise.policies.options import integer_option
from draftwise.policies.pricing import Price, PriceBook

Floats = NDArray[np.float64]

_EXPLORED_TOKENS = 7
# In a large batch one request in so many explores at once; and each of its tokens stands for so
# many that are not verified.
_REQUESTS_PER_EXPLORER = 12
_EXPLORED_WEIGHT = 2.0
# Steps of a new policy that are all learnt from if their signals are known, and then every how
# manieth: of few requests, and of so many that the batch tells enough. Learning takes time.
_APPRENTICESHIP = 64
_LEARN_FROM_FEW, _LEARN_FROM_MANY, _MANY_REQUESTS = 2, 6, 8
# Where signals decide nothing they are looked at in one of so many steps: of a new policy, of one
# request, and of so many that the batch tells enough.
_WATCH_YOUNG, _WATCH_ONE, _WATCH_MANY = 2, 4, 16


class PricedPolicy(Policy):
    """Drafts while a further draft is worth its price; subclasses choose what is verified.

    A step's prices come from earlier steps. Drafting ends for a request where the value of one
    more draw (:func:`draftwise.core.goodput.worth_drafting`) is not positive: a predictable cut.
    Now and then some requests in turn draft a few tokens that are all verified, whatever the prices
    say, so that estimates of what is not verified do not go stale; whose turn it is depends on the
    number of the step alone.
    """

    needs_latency = True

    def __init__(self, context: PolicyContext, explore_every: int = 64) -> None:
        """Set up.

        Args:
            context: with a latency model.
            explore_every: steps between two explorations, at least 2.
        """
        super().__init__(context)
        if context.latency is None:
            raise ValueError(f"{self.name} needs a latency model")
        self.prices = PriceBook(context.latency, context.num_speculative_tokens)
        self._explore_every = integer_option("explore_every", explore_every, 2)
        self._num_steps = 0
        self._requests: Sequence[RequestState] = ()
        self._greedy: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._history: Floats = np.zeros(0)
        self._price = Price(OperatingPoint(0), 0.0, 0.0)
        self._needed: tuple[Price, Floats] | None = None
        self._is_priced = False
        self._watches = True
        self._explorers: list[int] = []
        self._max_lengths: list[int] = []
        self._notes = RuleNotes.blank(0, 0)
        self._expected = self._notes.expected
        self._draft: Draft | None = None
        self._judgement: Judgement | None = None

    @abstractmethod
    def expect(self, position: DraftPosition) -> Floats:
        """``[active]`` probability that the token just drafted is accepted, for drafting on."""

    @abstractmethod
    def learn(
        self, signals: Signals, greedy: NDArray[np.bool_], acceptance: Floats, reached: Floats
    ) -> None:
        """Learn from ``n`` judged tokens: how likely each was to be accepted, and reached."""

    @property
    def believed(self) -> Floats:
        """``[batch, γ]`` all that is known of the acceptance of what the step drafted."""
        return self._expected

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """All that is allowed for everybody if a first draft pays, else nothing."""
        self._requests = requests
        self._num_steps += 1
        num_requests, gamma = len(requests), self.num_speculative_tokens
        limits = [min(gamma, request.draft_limit) for request in requests]
        self._draft = self._judgement = None
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        self._explorers = []
        self._max_lengths = [0] * num_requests
        self._is_priced = bool(drafting)
        self._watches = False
        self._expected = np.zeros((num_requests, 0))
        if not drafting:
            return self._max_lengths
        context = sum(request.num_tokens for request in requests)
        self._price = self.prices.price(num_requests, context)
        point = self._price.point
        turn, now = divmod(self._num_steps, self._explore_every)
        if now == 0:
            count = max(1, len(drafting) // _REQUESTS_PER_EXPLORER)
            first = turn * count
            self._explorers = [drafting[(first + i) % len(drafting)] for i in range(count)]
        elif point.max_length == 0:
            return self._max_lengths
        self._greedy = np.array([request.greedy for request in requests], dtype=bool)
        self._history = np.array([request.history for request in requests], dtype=np.float64)
        self._notes = RuleNotes.blank(num_requests, gamma)
        self._expected = self._notes.expected
        for index in drafting:
            self._max_lengths[index] = min(limits[index], point.max_length)
        for index in self._explorers:
            self._max_lengths[index] = min(_EXPLORED_TOKENS, limits[index])
        # With a length for everybody signals decide nothing: they are looked at now and then only.
        self._watches = (
            point.threshold > 0
            or bool(self._explorers)
            or self._num_steps % self._watch_every(num_requests) == 0
        )
        return self._max_lengths

    def uses_draft_signals(self) -> bool:
        """Whether this step's decisions, or learning from it, need them."""
        return self._watches

    def asks_while_drafting(self) -> bool:
        """Whether it watches."""
        return self._watches

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Go on while one more draw is worth its price."""
        if not self._watches:
            return None
        active = np.asarray(position.requests)
        expected = self.expect(position)
        self._expected[active, position.index] = expected
        self._notes.reach[active] *= expected
        left = np.asarray(self._max_lengths)[active] - position.index - 1
        goes_on = left > 0
        if self._price.point.threshold > 0:
            pays = self._notes.reach[active] >= self.needed_reach()[len(active), left]
            if self._explorers:
                pays |= np.isin(active, self._explorers)
            goes_on &= pays
        return torch.from_numpy(goes_on)

    def needed_reach(self) -> Floats:
        """``[requests + 1, longest + 1]`` from which reach on one more draw pays.

        By how many share the draft's next pass, and by how many draws each is still allowed.
        """
        price, num_requests = self._price, len(self._requests)
        if self._needed is None or self._needed[0] is not price:
            self._needed = price, np.zeros((0, 0))
        table = self._needed[1]
        if len(table) <= num_requests:
            if price.point.threshold > 0:
                table = self.prices.draft_thresholds(price, num_requests)
                table = np.maximum(table, price.point.threshold)
            else:
                table = np.zeros((num_requests + 1, self.num_speculative_tokens + 1))
            self._needed = price, table
        return table

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Follow prices and estimates."""
        draft = self._draft
        num_requests = len(self._requests)
        if not num_requests or outcome.acceptance is None or outcome.reach is None:
            return
        if times.is_typical and self._is_usual:
            seconds = times.total - times.companion
            self.prices.observe(seconds, outcome.num_drafted, outcome.num_verified)
        if draft is None or draft.signals is None or not self._learns():
            return
        acceptance = outcome.acceptance.cpu().double().numpy()
        width = acceptance.shape[1]
        known = np.arange(width) < np.asarray(outcome.known_lengths)[:, None]
        drafted = np.arange(width) < np.asarray(outcome.num_drafted)[:, None]
        failed = list(outcome.failed)
        known[failed] = drafted[failed] = False
        if not drafted.any():
            return
        # Of all that was drafted: what is verified was chosen because more was expected of it.
        expected = self._expected[:, :width]
        best_known = np.where(known, acceptance, self.believed[:, :width])
        kept = np.cumprod(best_known, axis=1)
        reached = np.concatenate([np.ones((num_requests, 1)), kept[:, :-1]], axis=1)
        self.prices.outlook.observe(expected[drafted], reached[drafted])
        # What is gained is the acceptance law's: blocks gain more than token after token.
        reach = outcome.reach.cpu().double().numpy()
        before = np.concatenate([np.ones((num_requests, 1)), reach[:, :-1]], axis=1)
        gained = np.where(known, reach / np.maximum(before, 1e-9), best_known)
        lengths = drafted.sum(axis=1)
        self.prices.traces.observe(self._num_steps, expected, gained, lengths, self._explorers)
        rows, places = np.nonzero(known)
        signals = self.signals_of(draft, self._judgement, rows, places)
        weights = reached[known]
        if self._price.point.threshold > 0:
            weights = np.where(np.isin(rows, self._explorers), _EXPLORED_WEIGHT, 1.0) * weights
        self.learn(signals, self._greedy[rows], acceptance[known], weights)

    def _watch_every(self, num_requests: int) -> int:
        if self._num_steps <= _APPRENTICESHIP:
            return _WATCH_YOUNG
        return min(_WATCH_ONE * num_requests, _WATCH_MANY)

    @property
    def _is_usual(self) -> bool:
        """Whether the step was run as its way of running is, with nothing done to learn."""
        learns_only = self._watches and self._price.point.threshold == 0
        return self._is_priced and not learns_only and not self._explorers

    def _learns(self) -> bool:
        """Whether this step, whose signals are known, is one to learn from."""
        is_rare = self._price.point.threshold == 0 or self._judgement is not None
        if self._num_steps <= _APPRENTICESHIP or self._explorers or is_rare:
            return True
        is_large = len(self._requests) >= _MANY_REQUESTS
        return self._num_steps % (_LEARN_FROM_MANY if is_large else _LEARN_FROM_FEW) == 0

    def signals_of(
        self,
        draft: Draft,
        judgement: Judgement | None,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> Signals:
        """Signals of some drafted tokens.

        Args:
            draft: with signals.
            judgement: ``None`` where no companion was asked.
            rows: ``[n]`` their requests.
            places: ``[n]`` their positions.
        """
        assert draft.signals is not None

        def taken(values: Tensor) -> Floats:
            picked: Floats = values.cpu().double().numpy()[rows, places]
            return picked

        nothing = np.zeros(len(rows))
        return Signals(
            token_prob=taken(draft.signals.token_probs),
            entropy=taken(draft.signals.entropy),
            history=self._history[rows],
            position=places.astype(np.float64),
            overlap=nothing if judgement is None else taken(judgement.overlap),
            agreement=nothing if judgement is None else taken(judgement.agreement),
        )

    def scorer(self, model: SignalModel) -> Scorer:
        """A model of acceptance, asked about every token of the vocabulary."""

        def score(
            draft: Draft,
            judgement: Judgement | None,
            rows: Integers,
            places: Integers,
        ) -> Tensor:
            assert draft.signals is not None
            device = draft.tokens.device
            at = torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)
            history = torch.from_numpy(self._history[rows]).float().to(device)
            return model.log_odds_over_vocabulary(
                draft.signals.beliefs[at],
                draft.signals.entropy[at],
                history,
                at[1],
                None if judgement is None else judgement.beliefs[at],
            )

        return score

    def keep_likely(
        self,
        draft: Draft,
        judgement: Judgement | None,
        expected: Floats,
        score: Scorer,
        threshold: float,
    ) -> Plan:
        """:func:`draftwise.policies.filtering.keep_likely` for all but who explores."""
        thresholds = self._thresholds(threshold)
        return keep_likely(draft, judgement, expected, score, thresholds, self._greedy)

    def keep_in_range(
        self, draft: Draft, expected: Floats, models: ModelPair, threshold: float
    ) -> Plan:
        """:func:`draftwise.policies.filtering.keep_in_range` for all but who explores.

        Args:
            draft: with signals.
            expected: ``[batch, width]`` P of the drawn tokens.
            models: of acceptance, that see nothing of a token but q(x).
            threshold: from which probability on a token is verified.
        """
        assert draft.signals is not None
        uncertainty = draft.signals.entropy.cpu().double().numpy()
        history, places = self._history[:, None], np.arange(uncertainty.shape[1], dtype=np.float64)

        def find(needed: Floats, greedy: bool) -> tuple[Floats, Floats]:
            return models[greedy].range_of_likely(uncertainty, history, places, needed)

        return keep_in_range(draft, expected, find, self._thresholds(threshold), self._greedy)

    def _thresholds(self, threshold: float) -> Floats:
        thresholds = np.full(len(self._requests), threshold)
        thresholds[self._explorers] = 0.0
        return thresholds
