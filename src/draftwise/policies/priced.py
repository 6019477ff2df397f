"""What all policies that price have in common: drafting at an operating point, and learning."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.goodput import OperatingPoint
from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, RuleNotes, StepTimes
from draftwise.estimators.combined import SignalModel, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import DraftPosition, Policy, PolicyContext, RequestState
from draftwise.policies.filtering import Integers, Scorer, keep_in_range, keep_likely
from draftwise.policies.pricing import Price, Pricing, PricingOptions

Floats = NDArray[np.float64]


class PricedPolicy(Policy):
    """Drafts at the operating point with the best goodput; subclasses choose what is verified.

    A step's prices come from earlier steps. Drafting ends for a request where the probability that
    all its tokens so far are kept falls below the threshold of the operating point: a predictable
    cut. Now and then one request in turn drafts a whole draft that is all verified, whatever the
    prices say, so that estimates of what is not verified do not go stale; whose turn it is depends
    on the number of the step alone.
    """

    needs_latency = True

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up.

        Args:
            context: with a latency model.
            options: fields of :class:`draftwise.policies.pricing.PricingOptions`.

        Raises:
            InvalidParameterError: an option is out of its range.
        """
        super().__init__(context)
        if context.latency is None:
            raise ValueError(f"{self.name} needs a latency model")
        self.options = PricingOptions(**options)  # type: ignore[arg-type]
        self.prices = Pricing(context.latency, context.num_speculative_tokens, self.options)
        self._num_steps = 0
        self._requests: Sequence[RequestState] = ()
        self._greedy: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._history: Floats = np.zeros(0)
        self._price = Price(OperatingPoint(0), 0.0, 0.0)
        self._is_priced = False
        self._watches = True
        self._explorer: int | None = None
        self._max_lengths: list[int] = []
        self._notes = RuleNotes.blank(0, 0)
        self._expected = self._notes.expected
        self._draft: Draft | None = None
        self._companion_scores: CompanionScores | None = None

    @abstractmethod
    def expect(self, position: DraftPosition) -> Floats:
        """``[active]`` probability that the token just drafted is accepted, for drafting on."""

    @abstractmethod
    def learn(
        self, signals: Signals, greedy: NDArray[np.bool_], acceptance: Floats, reached: Floats
    ) -> None:
        """Learn from ``n`` scored tokens: how likely each was to be accepted, and reached."""

    @property
    def believed(self) -> Floats:
        """``[batch, γ]`` all that is known of the acceptance of what the step drafted."""
        return self._expected

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """The length of the operating point for every request, as far as there is room."""
        self._requests = requests
        self._num_steps += 1
        num_requests, gamma = len(requests), self.num_speculative_tokens
        limits = [min(gamma, request.draft_limit) for request in requests]
        self._draft = self._companion_scores = None
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        self._explorer = None
        self._max_lengths = [0] * num_requests
        self._is_priced = bool(drafting)
        self._watches = False
        self._expected = np.zeros((num_requests, 0))
        if not drafting:
            return self._max_lengths
        context = sum(request.num_tokens for request in requests)
        self._price = self.prices.price(num_requests, context)
        point = self._price.point
        turn, rest = divmod(self._num_steps, self.options.explore_every)
        if rest == 0:
            self._explorer = drafting[turn % len(drafting)]
        elif point.max_length == 0:
            return self._max_lengths
        self._greedy = np.array([request.greedy for request in requests], dtype=bool)
        self._history = np.array([request.history for request in requests], dtype=np.float64)
        self._notes = RuleNotes.blank(num_requests, gamma)
        self._expected = self._notes.expected
        for index in drafting:
            self._max_lengths[index] = min(limits[index], point.max_length)
        if self._explorer is not None:
            self._max_lengths[self._explorer] = limits[self._explorer]
        # Without a threshold signals decide nothing: they are looked at to learn from them.
        self._watches = point.threshold > 0 or self._learns_now
        return self._max_lengths

    def uses_draft_signals(self) -> bool:
        """Whether this step's decisions, or learning from it, need them."""
        return self._watches

    def asks_while_drafting(self) -> bool:
        """Whether it watches."""
        return self._watches

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Go on while the probability that all tokens are kept reaches the threshold."""
        if not self._watches:
            return None
        active = np.asarray(position.requests)
        expected = self.expect(position)
        self._expected[active, position.index] = expected
        self._notes.prefix_acceptance_prob[active] *= expected
        left = np.asarray(self._max_lengths)[active] - position.index - 1
        needed = self._thresholds(self._price.point.threshold)[active]
        goes_on = (left > 0) & (self._notes.prefix_acceptance_prob[active] >= needed)
        return torch.from_numpy(goes_on)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Follow prices and estimates."""
        draft = self._draft
        num_requests = len(self._requests)
        if not num_requests or outcome.acceptance is None or outcome.prefix_acceptance_prob is None:
            return
        if times.is_typical and self._is_usual:
            seconds = times.total - times.companion
            self.prices.observe(seconds, outcome.num_drafted, outcome.num_verified)
        if draft is None or draft.signals is None or not self._learns_now:
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
        # What is gained is the acceptance law's: blocks gain more than token after token.
        prefix_acceptance_prob = outcome.prefix_acceptance_prob.cpu().double().numpy()
        before = np.concatenate(
            [np.ones((num_requests, 1)), prefix_acceptance_prob[:, :-1]], axis=1
        )
        gained = np.where(known, prefix_acceptance_prob / np.maximum(before, 1e-9), best_known)
        lengths = drafted.sum(axis=1)
        self.prices.drafts.observe(expected, gained, lengths)
        rows, places = np.nonzero(known)
        signals = self.signals_of(draft, self._companion_scores, rows, places)
        self.learn(signals, self._greedy[rows], acceptance[known], reached[known])

    @property
    def _is_usual(self) -> bool:
        """Whether the step was run as its operating point is, with nothing done to learn."""
        learns_only = self._watches and self._price.point.threshold == 0
        return self._is_priced and not learns_only and self._explorer is None

    @property
    def _learns_now(self) -> bool:
        """Whether the step is one to learn from."""
        # Every other step at first, so that the steps between show what a step takes.
        every = 2 if self._num_steps <= self.options.warm_up else self.options.learn_every
        return (
            self._num_steps % every == 0
            or self._explorer is not None
            or self._companion_scores is not None
        )

    def signals_of(
        self,
        draft: Draft,
        companion_scores: CompanionScores | None,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> Signals:
        """Signals of some drafted tokens.

        Args:
            draft: with signals.
            companion_scores: ``None`` where no companion was asked.
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
            overlap=nothing if companion_scores is None else taken(companion_scores.overlap),
            agreement=nothing if companion_scores is None else taken(companion_scores.agreement),
        )

    def scorer(self, model: SignalModel) -> Scorer:
        """A model of acceptance, asked about every token of the vocabulary."""

        def score(
            draft: Draft,
            companion_scores: CompanionScores | None,
            rows: Integers,
            places: Integers,
        ) -> Tensor:
            assert draft.signals is not None
            device = draft.tokens.device
            at = torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)
            history = torch.from_numpy(self._history[rows]).float().to(device)
            return model.log_odds_over_vocabulary(
                draft.signals.draft_probs[at],
                draft.signals.entropy[at],
                history,
                at[1],
                None if companion_scores is None else companion_scores.probs[at],
            )

        return score

    def keep_likely(
        self,
        draft: Draft,
        companion_scores: CompanionScores | None,
        expected: Floats,
        score: Scorer,
        threshold: float,
    ) -> Plan:
        """:func:`draftwise.policies.filtering.keep_likely` but the explorer keeps all."""
        thresholds = self._thresholds(threshold)
        return keep_likely(draft, companion_scores, expected, score, thresholds, self._greedy)

    def keep_in_range(
        self, draft: Draft, expected: Floats, models: ModelPair, threshold: float
    ) -> Plan:
        """:func:`draftwise.policies.filtering.keep_in_range` but the explorer keeps all.

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
        if self._explorer is not None:
            thresholds[self._explorer] = 0.0
        return thresholds
