"""Drafting with a model at the operating point with the best goodput, learnt from steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.goodput import OperatingPoint
from draftwise.core.rules import RuleResults
from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.estimators.combined import SignalModel, Signals
from draftwise.estimators.pair import ModelPair
from draftwise.policies.base import Policy, PolicyContext
from draftwise.policies.exploration import Exploration
from draftwise.policies.filtering import Integers, Scorer, keep_in_range, keep_likely
from draftwise.policies.inputs import DraftPosition, RequestState
from draftwise.policies.pricing import Price, Pricing
from draftwise.policies.pricing_options import PricingOptions

Floats = NDArray[np.float64]


# Length of an exploring request's draft, relative to the operating point's number of passes, and
# its minimum. The request's limit caps it.
_EXPLORED_BEYOND, _LEAST_EXPLORED = 2.0, 5


class PricedChains(Policy):
    """Drafts with a model at the operating point with the best goodput.

    Subclasses select what is verified. A step's prices come from earlier steps. A request stops
    drafting when the probability that all its tokens so far are accepted falls below the threshold
    of the operating point. This is a predictable cut. At regular intervals, counted at each batch
    size, one request explores: it drafts twice the expected number of passes, or five tokens if
    that is more, and all its tokens are verified, regardless of prices. So the estimates of tokens
    that are usually not verified stay up to date. Requests explore in turn. While nothing else is
    drafted, the intervals double, because exploring costs time. Who explores, and how far, depends
    on earlier steps only.
    """

    needs_latency = True

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`; a latency model is required.
            options: fields of :class:`draftwise.policies.pricing_options.PricingOptions`.

        Raises:
            InvalidParameterError: an option is out of range.
        """
        super().__init__(context)
        if context.latency is None:
            raise ValueError(f"{self.name} needs a latency model")
        self.options = PricingOptions(**options)  # type: ignore[arg-type]
        self.prices = Pricing(
            context.latency, context.num_speculative_tokens, self.options, filters=self.filters
        )
        # Requests for which the draft model does not draft, and whether the others do as the
        # operating point says.
        self._is_offered: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._follows_point = True
        self._num_steps = 0
        self.exploration = Exploration(self.options.explore_every)
        self._requests: Sequence[RequestState] = ()
        self._num_context_tokens = 0
        self._greedy: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._history: Floats = np.zeros(0)
        self._price = Price(OperatingPoint(0), 0.0, 0.0)
        self._is_priced = False
        self._uses_signals = True
        # Time that a step takes to look for continuations, which has a price of its own.
        self._looking_seconds = 0.0
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
            if requests:
                self.prices.cancel_trial(num_requests)
            return self._max_lengths
        self._price = self.prices.price(num_requests, self._num_context_tokens)
        point = self._price.point
        self._explorer = self.exploration.explorer(num_requests, drafting)
        if self._explorer is None and point.max_length == 0:
            return self._max_lengths
        self._greedy = np.array([request.greedy for request in requests], dtype=bool)
        self._history = np.array([request.history for request in requests], dtype=np.float64)
        self._rule_results = RuleResults.initial(num_requests, gamma)
        self._expected = self._rule_results.expected
        for index in drafting:
            self._max_lengths[index] = min(limits[index], point.max_length)
        if self._explorer is not None:
            estimate = self.prices.estimate
            passes = 0.0 if estimate is None else estimate.passes
            longest = max(_LEAST_EXPLORED, math.ceil(_EXPLORED_BEYOND * passes))
            self._max_lengths[self._explorer] = min(limits[self._explorer], longest)
        # Without a threshold, signals decide nothing. Then they are computed only to learn.
        self._uses_signals = point.threshold > 0 or self._learns_from_step
        return self._max_lengths

    def _begin_step(self, requests: Sequence[RequestState]) -> None:
        """Discard the state of the last step. Nothing is drafted by an operating point yet."""
        self._requests = requests
        self._num_context_tokens = sum(request.num_tokens for request in requests)
        self._num_steps += 1
        self._draft = self._companion_scores = self._explorer = None
        self._max_lengths = [0] * len(requests)
        self._is_priced = self._uses_signals = False
        self._follows_point = True
        self._looking_seconds = 0.0
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
        if times.is_typical and self._runs_as_priced:
            seconds = times.total - times.companion - self._looking_seconds
            self.prices.observe(seconds, outcome.num_drafted, outcome.num_verified)
        if self._is_offered.all():
            return
        drafted_by_model = zip(outcome.num_drafted, self._is_offered.tolist(), strict=True)
        if any(
            drafted and not offered and index != self._explorer
            for index, (drafted, offered) in enumerate(drafted_by_model)
        ):
            self.exploration.others_drafted()
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
        # Where the model drafts for some requests only, these were chosen because it gains there.
        is_fair = np.full(num_requests, self._follows_point)
        if self._explorer is not None:
            is_fair[self._explorer] = True
        lengths = drafted.sum(axis=1)
        if is_fair.any():
            self.prices.drafts.observe(expected[is_fair], gained[is_fair], lengths[is_fair])
        rows, places = np.nonzero(known)
        signals = self.signals_of(draft, self._companion_scores, rows, places)
        self.learn(signals, self._greedy[rows], acceptance[known], reach_probability[known])

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

    @property
    def filter_threshold(self) -> float:
        """Probability below which this step's drafted tokens are not verified; 0 verifies all."""
        point = self._price.point
        return 0.0 if point.verifies_all else point.threshold

    def _thresholds(self, threshold: float) -> Floats:
        """``[batch]`` threshold of each request; 0 for the explorer and for offered tokens."""
        thresholds = np.where(self._is_offered, 0.0, threshold)
        if self._explorer is not None:
            thresholds[self._explorer] = 0.0
        return thresholds
