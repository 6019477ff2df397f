"""The base class of priced policies: they draft at an operating point, and learn from steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.goodput import OperatingPoint
from draftwise.core.rules import RuleResults
from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.estimators.combined import SignalModel, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import (
    DraftChoice,
    DraftPosition,
    Policy,
    PolicyContext,
    RequestState,
    TreeLevel,
)
from draftwise.policies.exploration import Exploration
from draftwise.policies.filtering import Integers, Scorer, keep_in_range, keep_likely
from draftwise.policies.looking import LookingValue
from draftwise.policies.offers import OfferPricing
from draftwise.policies.pricing import Price, Pricing, PricingOptions
from draftwise.policies.shapes import ShapeChoice

Floats = NDArray[np.float64]


class PricedPolicy(Policy):
    """Drafts at the operating point with the best goodput. Subclasses select what is verified.

    A step's prices come from earlier steps. A request stops drafting when the probability that all
    its tokens so far are accepted falls below the threshold of the operating point. This is a
    predictable cut. At regular intervals one request explores: it drafts to its limit and all its
    tokens are verified, regardless of prices. So the estimates of tokens that are usually not
    verified stay up to date. Requests explore in turn. While nothing else is drafted, the intervals
    double, because exploring costs time. Who explores depends on earlier steps only.

    Offered tokens need no operating point, because their acceptance is estimated before the step.
    See :mod:`draftwise.policies.offers`.
    """

    needs_latency = True

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model is required.
            options: fields of :class:`draftwise.policies.pricing.PricingOptions`.

        Raises:
            InvalidParameterError: an option is out of range.
        """
        super().__init__(context)
        if context.latency is None:
            raise ValueError(f"{self.name} needs a latency model")
        self.options = PricingOptions(**options)  # type: ignore[arg-type]
        self.prices = Pricing(context.latency, context.num_speculative_tokens, self.options)
        self.offers = OfferPricing(context.latency)
        self.shapes = ShapeChoice()
        self.looking = LookingValue()
        self._saved_seconds = 0.0
        # Whether the coming step, and the current one, were asked about.
        self._is_asked_for_shape = self._has_shape = self._is_asked_to_look = False
        self._is_offered: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._chose_sources = False
        self._follows_point = True
        self._weights: Floats = np.ones(0)
        self._num_steps = 0
        self.exploration = Exploration(self.options.explore_every)
        self._requests: Sequence[RequestState] = ()
        self._num_context_tokens = self._num_growing = 0
        self._greedy: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._history: Floats = np.zeros(0)
        self._price = Price(OperatingPoint(0), 0.0, 0.0)
        self._is_priced = False
        self._uses_signals = True
        self._explorer: int | None = None
        self._max_lengths: list[int] = []
        self._rule_results = RuleResults.initial(0, 0)
        self._expected = self._rule_results.expected
        self._draft: Draft | None = None
        self._companion_scores: CompanionScores | None = None

    @abstractmethod
    def expect(self, position: DraftPosition) -> Floats:
        """``[active]`` estimated acceptance probability of the token just drafted."""

    @abstractmethod
    def learn(
        self,
        signals: Signals,
        greedy: NDArray[np.bool_],
        acceptance: Floats,
        reach_probability: Floats,
    ) -> None:
        """Learn from tokens with known acceptance.

        Args:
            signals: signals of ``n`` tokens.
            greedy: ``[n]`` whether the request of each token is decoded at temperature 0.
            acceptance: ``[n]`` acceptance probability of each token.
            reach_probability: ``[n]`` probability that all tokens before it are accepted.
        """

    @property
    def acceptance_estimate(self) -> Floats:
        """``[batch, γ]`` acceptance estimates of the drafted tokens, from all signals."""
        return self._expected

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """The operating point's draft length, capped by each request's ``draft_limit``."""
        self._begin_step(requests)
        num_requests, gamma = len(requests), self.num_speculative_tokens
        limits = [min(gamma, r.draft_limit) if r.has_model else 0 for r in requests]
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        self._is_priced = bool(drafting)
        if not drafting:
            return self._max_lengths
        self._price = self.prices.price(num_requests, self._num_context_tokens)
        point = self._price.point
        self._explorer = self.exploration.explorer(self._num_steps, drafting)
        if self._explorer is None and point.max_length == 0:
            return self._max_lengths
        self._greedy = np.array([request.greedy for request in requests], dtype=bool)
        self._history = np.array([request.history for request in requests], dtype=np.float64)
        self._rule_results = RuleResults.initial(num_requests, gamma)
        self._expected = self._rule_results.expected
        for index in drafting:
            self._max_lengths[index] = min(limits[index], point.max_length)
        if self._explorer is not None:
            self._max_lengths[self._explorer] = limits[self._explorer]
        # Without a threshold, signals decide nothing. Then they are computed only to learn.
        self._uses_signals = point.threshold > 0 or self._learns_from_step
        return self._max_lengths

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether looking for offers pays, or the time without or with them is to be measured."""
        self._num_context_tokens = sum(request.num_tokens for request in requests)
        self._num_growing = len(requests)
        self._is_asked_to_look = True
        return self.offers.looks(len(requests))

    def adds_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether looking for continuations saves more than it costs, or is to be measured.

        Trials of operating points are of the draft model alone, because only steps without
        continuations have the point's time.
        """
        if not requests or self.prices.will_try(len(requests)):
            return False
        return self.looking.looks(len(requests))

    def looked_for_offers(self, seconds: float) -> None:
        """Compare the time with what the continuations are expected to save."""
        if self._requests:
            self.looking.observe(len(self._requests), self._saved_seconds, seconds)

    def branches(self, requests: Sequence[RequestState]) -> bool:
        """Whether trees have had the better goodput, or have their turn to be measured."""
        if not requests:
            return False
        self._is_asked_for_shape = True
        branches = self.shapes.branches(len(requests))
        if branches:
            self._uses_signals = False
        return branches

    def least_node_value(self, request: int, num_nodes: int) -> float:
        """The value at which a node saves as much time as it adds."""
        context = self._num_context_tokens
        return self.offers.least_node_value(self._num_growing, num_nodes, context)

    def grow_trees(self, level: TreeLevel) -> NDArray[np.bool_]:
        """Give children to the nodes whose children are worth another pass of the draft model."""
        return self.offers.grow_trees(level, self._num_growing, self._num_context_tokens)

    def skip_drafts(self, requests: Sequence[RequestState]) -> None:
        """Begin a step that is only timed."""
        self._begin_step(requests)
        self._is_offered, self._chose_sources = np.ones(len(requests), dtype=bool), True
        self._weights = np.ones(len(requests))

    def plan_drafts(self, requests: Sequence[RequestState]) -> list[DraftChoice]:
        """Choose the offered tokens that are worth verifying, and who drafts with the model.

        The model drafts for the requests for which its draft is worth more than the offer, if
        together they gain more than its passes cost.
        """
        if not requests:
            self._begin_step(requests)
            return []
        if not self._is_asked_to_look:
            self.offers.always_look()
        has_model = any(request.has_model for request in requests)
        if has_model:
            limits = self.draft_lengths(requests)
        else:
            self._begin_step(requests)
            limits = self._max_lengths
        context = self._num_context_tokens
        self._weights = self.offers.weights(requests, context)
        goodput = max(self._price.goodput, self.offers.goodput(len(requests), context))
        values = self._weights / goodput
        selected = self.offers.select(requests, values, context)
        uses_model = np.zeros(len(requests), dtype=bool)
        if has_model:
            uses_model = self._uses_model(requests, limits, values, selected, context)
        choices = [
            DraftChoice(limit, False) if drafts else DraftChoice(length, True)
            for drafts, limit, length in zip(uses_model, limits, selected.tolist(), strict=True)
        ]
        self._is_offered, self._chose_sources = ~uses_model, True
        point = self._price.point
        if uses_model.any():
            # Requests that cannot draft do not make a step untypical.
            self._follows_point = not any(
                choice.uses_offer and (choice.length or limit)
                for choice, limit in zip(choices, limits, strict=True)
            )
        else:
            self._follows_point = point.max_length == 0 and not selected.any()
            self._is_priced &= self._follows_point
            self._uses_signals = False
            self._price = replace(self._price, point=OperatingPoint(0))
        return choices

    def _uses_model(
        self,
        requests: Sequence[RequestState],
        limits: Sequence[int],
        values: Floats,
        selected: Integers,
        context: int,
    ) -> NDArray[np.bool_]:
        """``[batch]`` whether the draft model drafts for each request."""
        can_draft = np.asarray(limits) > 0
        estimate = self.prices.estimate
        if not self._price.point.max_length:
            estimate = None
        slowdown = self.prices.slowdown(self.offers.pace(len(requests)))
        prefers, self._saved_seconds = self.offers.prefers_model(
            requests, values, selected, context, estimate, slowdown
        )
        uses_model = can_draft & prefers
        if self.prices.tries_challenger:
            # Nothing would be learnt about the point on trial without it.
            uses_model = can_draft
        if self._explorer is not None:
            uses_model[self._explorer] = can_draft[self._explorer]
        return uses_model

    def _begin_step(self, requests: Sequence[RequestState]) -> None:
        """Discard the state of the last step. Nothing is drafted by an operating point yet."""
        self._requests = requests
        self._num_context_tokens = sum(request.num_tokens for request in requests)
        self._has_shape, self._is_asked_for_shape = self._is_asked_for_shape, False
        self._is_asked_to_look = False
        self._num_steps += 1
        self._draft = self._companion_scores = self._explorer = None
        self._max_lengths = [0] * len(requests)
        self._is_priced = self._uses_signals = self._chose_sources = False
        self._saved_seconds = 0.0
        self._follows_point = True
        self._is_offered = np.zeros(len(requests), dtype=bool)
        self._price = Price(OperatingPoint(0), 0.0, 0.0)
        self._expected = np.zeros((len(requests), 0))

    def uses_draft_signals(self) -> bool:
        """Whether this step's decisions use signals, or whether the policy learns from it."""
        return self._uses_signals

    def may_stop_drafting(self) -> bool:
        """Whether this step uses signals."""
        return self._uses_signals

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Continue while the probability that all tokens are accepted reaches the threshold."""
        if not self._uses_signals:
            return None
        active = np.asarray(position.requests)
        expected = self.expect(position)
        self._expected[active, position.index] = expected
        self._rule_results.prefix_acceptance_prob[active] *= expected
        left = np.asarray(self._max_lengths)[active] - position.index - 1
        thresholds = self._thresholds(self._price.point.threshold)[active]
        continues = (left > 0) & (self._rule_results.prefix_acceptance_prob[active] >= thresholds)
        return torch.from_numpy(continues)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Update prices and acceptance estimates from a step."""
        draft = self._draft
        num_requests = len(self._requests)
        if not num_requests or outcome.acceptance is None or outcome.prefix_acceptance_prob is None:
            return
        if self._has_shape and times.is_typical:
            self.shapes.observe(
                1.0 + sum(outcome.num_accepted) / num_requests,
                self.offers.relative_duration(num_requests, self._num_context_tokens, times.total),
            )
        if self._chose_sources and times.is_typical:
            # In a batch that nobody joins, tokens count by what they take off its end.
            num_tokens = num_requests + float(self._weights @ np.asarray(outcome.num_accepted))
            context, verified = self._num_context_tokens, sum(outcome.num_verified)
            self.offers.observe(num_requests, context, verified, num_tokens, times)
        if times.is_typical and (self._is_offered.all() or not any(outcome.num_drafted)):
            context, verified = self._num_context_tokens, sum(outcome.num_verified)
            self.offers.observe_pace(num_requests, context, verified, times.total)
        if times.is_typical and self._runs_as_priced:
            seconds = times.total - times.companion
            self.prices.observe(seconds, outcome.num_drafted, outcome.num_verified)
        if self._is_offered.all():
            return
        by_others = (np.asarray(outcome.num_drafted) > 0) & ~self._is_offered
        if self._explorer is not None:
            by_others[self._explorer] = False
        self.exploration.others_drafted |= bool(by_others.any())
        if self._chose_sources:
            self._observe_model_gains(outcome)
        if draft is None or draft.signals is None or not self._learns_from_step:
            return
        acceptance = outcome.acceptance.cpu().double().numpy()
        width = acceptance.shape[1]
        known = np.arange(width) < np.asarray(outcome.known_lengths)[:, None]
        drafted = np.arange(width) < np.asarray(outcome.num_drafted)[:, None]
        failed = list(outcome.failed)
        known[failed] = drafted[failed] = False
        known[self._is_offered] = drafted[self._is_offered] = False
        if not drafted.any():
            return
        # Record all drafted tokens. Verified tokens alone are biased: they were selected because
        # their estimates were high.
        expected = self._expected[:, :width]
        best_known = np.where(known, acceptance, self.acceptance_estimate[:, :width])
        kept = np.cumprod(best_known, axis=1)
        reach_probability = np.concatenate([np.ones((num_requests, 1)), kept[:, :-1]], axis=1)
        # Gains are those of the acceptance law. Block verification gains more than token-by-token
        # verification.
        prefix_acceptance_prob = outcome.prefix_acceptance_prob.cpu().double().numpy()
        before = np.concatenate(
            [np.ones((num_requests, 1)), prefix_acceptance_prob[:, :-1]], axis=1
        )
        gained = np.where(known, prefix_acceptance_prob / np.maximum(before, 1e-9), best_known)
        lengths = drafted.sum(axis=1)
        self.prices.drafts.observe(expected, gained, lengths)
        rows, places = np.nonzero(known)
        signals = self.signals_of(draft, self._companion_scores, rows, places)
        self.learn(signals, self._greedy[rows], acceptance[known], reach_probability[known])

    def _observe_model_gains(self, outcome: Outcome) -> None:
        """Learn how many tokens the draft model gains for different requests."""
        drafted = np.asarray(outcome.num_drafted) > 0
        drafted &= ~self._is_offered
        drafted[list(outcome.failed)] = False
        assert outcome.prefix_acceptance_prob is not None
        gained = outcome.prefix_acceptance_prob.cpu().double().numpy().sum(axis=1)
        requests = [self._requests[index] for index in np.flatnonzero(drafted).tolist()]
        estimate = self.prices.estimate
        if estimate is not None:
            average = estimate.tokens / len(self._requests) - 1.0
            self.offers.model_gains.observe(requests, gained[drafted], average)

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        self.offers.forget(request_ids)

    @property
    def _runs_as_priced(self) -> bool:
        """Whether the step's time is typical of its operating point.

        It is not typical if the policy explored or computed signals only to learn, or if some
        requests used an offer.
        """
        signals_only_for_learning = self._uses_signals and self._price.point.threshold == 0
        is_typical = self._follows_point and not signals_only_for_learning
        return self._is_priced and is_typical and self._explorer is None

    @property
    def _learns_from_step(self) -> bool:
        """Whether the policy learns from this step."""
        # At first, learn from every other step. The steps between them have typical times.
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
        """Signals of selected drafted tokens.

        Args:
            draft: the draft, with signals.
            companion_scores: the companion's scores; ``None`` if it did not score the draft.
            rows: ``[n]`` requests of the tokens.
            places: ``[n]`` positions of the tokens in their drafts.
        """
        assert draft.signals is not None

        def selected(values: Tensor) -> Floats:
            entries: Floats = values.cpu().double().numpy()[rows, places]
            return entries

        zeros = np.zeros(len(rows))
        return Signals(
            token_prob=selected(draft.signals.token_probs),
            entropy=selected(draft.signals.entropy),
            history=self._history[rows],
            position=places.astype(np.float64),
            overlap=zeros if companion_scores is None else selected(companion_scores.overlap),
            agreement=zeros if companion_scores is None else selected(companion_scores.agreement),
        )

    def scorer(self, model: SignalModel) -> Scorer:
        """A function that applies an acceptance model to every token of the vocabulary."""

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
        """Apply :func:`draftwise.policies.filtering.keep_likely`. The explorer keeps all tokens."""
        thresholds = self._thresholds(threshold)
        return keep_likely(draft, companion_scores, expected, score, thresholds, self._greedy)

    def keep_in_range(
        self, draft: Draft, expected: Floats, models: ModelPair, threshold: float
    ) -> Plan:
        """Apply :func:`draftwise.policies.filtering.keep_in_range`. The explorer keeps all tokens.

        Args:
            draft: the draft, with signals.
            expected: ``[batch, width]`` P of the drawn tokens.
            models: acceptance models in which P depends on the token through q(x) only.
            threshold: minimum probability at which a token is verified.
        """
        assert draft.signals is not None
        entropy = draft.signals.entropy.cpu().double().numpy()
        history, places = self._history[:, None], np.arange(entropy.shape[1], dtype=np.float64)

        def find(required: Floats, greedy: bool) -> tuple[Floats, Floats]:
            return models[greedy].likely_range(entropy, history, places, required)

        return keep_in_range(draft, expected, find, self._thresholds(threshold), self._greedy)

    def _thresholds(self, threshold: float) -> Floats:
        """``[batch]`` threshold of each request; 0 for the explorer and for offered tokens."""
        thresholds = np.where(self._is_offered, 0.0, threshold)
        if self._explorer is not None:
            thresholds[self._explorer] = 0.0
        return thresholds
