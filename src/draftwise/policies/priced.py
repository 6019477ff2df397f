"""The base class of priced policies: continuations and token trees beside chains of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from draftwise.core.goodput import OperatingPoint
from draftwise.core.types import Outcome, StepTimes
from draftwise.policies.base import DraftChoice, PolicyContext
from draftwise.policies.filtering import Integers
from draftwise.policies.inputs import RequestState, TreeLevel
from draftwise.policies.looking import LookingValue
from draftwise.policies.offers import OfferPricing, StepKind
from draftwise.policies.priced_chains import PricedChains
from draftwise.policies.shapes import ShapeChoice
from draftwise.policies.sources import SourceChoice
from draftwise.policies.token_weights import TokenWeights

Floats = NDArray[np.float64]

# Of consecutive steps that draft nothing, the first two are learnt from, and then one in so many.
_LEARN_FROM_RESTS = 4


class PricedPolicy(PricedChains):
    """Chooses the source and the shape of drafts by prices.

    Offered tokens need no operating point, because their acceptance is estimated before the step.
    See :mod:`draftwise.policies.offers`. What a step drafts with a model follows
    :class:`draftwise.policies.priced_chains.PricedChains`.
    """

    def __init__(self, context: PolicyContext, **options: float) -> None:
        """Set up; see :class:`draftwise.policies.priced_chains.PricedChains`."""
        super().__init__(context, **options)
        assert context.latency is not None
        self.offers = OfferPricing(context.latency)
        self.token_weights = TokenWeights(context.latency)
        self.sources = SourceChoice(context.latency)
        self.shapes = ShapeChoice()
        self.looking = LookingValue()
        # Whether the coming step, and the current one, were asked about.
        self._is_asked_for_shape = self._has_shape = self._is_asked_to_look = False
        self._grows_trees = False
        self._chose_sources = False
        # Whether the coming step, and the current one, only time a step without drafts.
        self._is_asked_to_rest = self._rests = False
        self._num_rests_in_row = 0
        self._saved_seconds = 0.0
        self._num_growing = 0
        self._node_value: tuple[int, float] | None = None
        self._weights: Floats = np.ones(0)

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether looking for offers pays, or the time without or with them is to be measured."""
        self._num_context_tokens = sum(request.num_tokens for request in requests)
        self._num_growing, self._node_value = len(requests), None
        self._is_asked_to_look = True
        grows = self._grows_trees and self._is_asked_for_shape
        if grows and any(request.has_model for request in requests):
            # Steps without drafts are measured among those with chains.
            self.offers.always_look(StepKind.TREES)
            return True
        kind = StepKind.TREES if grows else StepKind.ALONE
        return self.offers.looks(len(requests), kind)

    def adds_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether looking for continuations saves more than it costs, or is to be measured.

        Trials of operating points are of the draft model alone, because only steps without
        continuations have the point's time. Where the operating point does not draft, steps with
        and without continuations are compared as if there were no draft model.
        """
        count = len(requests)
        if not count or self.prices.will_measure(count):
            self.offers.interrupt()
            return False
        if self.prices.uses_model(count) or not self.prices.has_times(count):
            self.offers.interrupt()
            return self.looking.looks(count)
        self._is_asked_to_look = self.offers.looks(count)
        self._is_asked_to_rest = not self._is_asked_to_look
        return self._is_asked_to_look

    def looked_for_offers(self, seconds: float) -> None:
        """Compare the time with what the continuations are expected to save."""
        if not self._requests:
            return
        self._looking_seconds = seconds
        if self.offers.kind is StepKind.BESIDE_MODEL:
            count = len(self._requests)
            usual = self.offers.usual_seconds(count, self._num_context_tokens)
            self.looking.observe(count, self._saved_seconds, seconds, usual)

    def branches(self, requests: Sequence[RequestState]) -> bool:
        """Whether trees have had the better goodput, or have their turn to be measured."""
        if not requests:
            return False
        self._is_asked_for_shape = True
        branches = self.shapes.branches(len(requests))
        self._grows_trees = branches
        if branches:
            self._uses_signals = False
        return branches

    def least_node_value(self, request: int, num_nodes: int) -> float:
        """The value at which a node saves as much time as it adds."""
        # All trees of a level have the same number of nodes so far.
        if self._node_value is None or self._node_value[0] != num_nodes:
            least = self.offers.least_node_value(
                self._num_growing, num_nodes, self._num_context_tokens
            )
            self._node_value = num_nodes, least
        return self._node_value[1]

    def grow_trees(self, level: TreeLevel) -> NDArray[np.bool_]:
        """Give children to the nodes whose children are worth another pass of the draft model."""
        return self.offers.grow_trees(level, self._num_growing, self._num_context_tokens)

    def skip_drafts(self, requests: Sequence[RequestState]) -> None:
        """Begin a step that is only timed."""
        self._begin_step(requests)
        self._is_offered, self._chose_sources = np.ones(len(requests), dtype=bool), True
        self._rests = True
        self._weights, self._grows_trees = np.ones(len(requests)), False

    def plan_drafts(self, requests: Sequence[RequestState]) -> list[DraftChoice]:
        """Choose the offered tokens that are worth verifying, and who drafts with the model.

        The model drafts for the requests for which its draft is worth more than the offer, if
        together they gain more than its passes cost.
        """
        if not requests:
            self._begin_step(requests)
            return []
        is_beside_model = not self._is_asked_to_look
        if is_beside_model:
            self.offers.always_look()
        has_model = any(request.has_model for request in requests)
        if has_model:
            limits = self.draft_lengths(requests)
        else:
            self._begin_step(requests)
            limits = self._max_lengths
        context = self._num_context_tokens
        self._weights = self.token_weights.weights(requests, context, self.offers.looks_now)
        goodput = max(self._price.goodput, self.offers.goodput(len(requests), context))
        values = self._weights / goodput
        selected = self.offers.select(requests, values, context)
        uses_model = np.zeros(len(requests), dtype=bool)
        if has_model:
            uses_model = self._uses_model(requests, limits, values, selected, context)
        elif is_beside_model:
            _, self._saved_seconds = self.sources.choose(requests, values, selected, context, None)
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
        slowdown = self.prices.slowdown(self.sources.pace(len(requests)))
        prefers, self._saved_seconds = self.sources.choose(
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
        """Discard the state of the last step."""
        super()._begin_step(requests)
        self._node_value = None
        self._has_shape, self._is_asked_for_shape = self._is_asked_for_shape, False
        self._grows_trees &= self._has_shape
        self._is_asked_to_look = self._chose_sources = False
        self._rests, self._is_asked_to_rest = self._is_asked_to_rest, False
        self._saved_seconds = 0.0

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Update prices and acceptance estimates from a step."""
        num_requests = len(self._requests)
        if not num_requests or outcome.acceptance is None or outcome.prefix_acceptance_prob is None:
            return
        if self._has_shape and times.is_typical:
            self.shapes.observe(
                1.0 + sum(outcome.num_accepted) / num_requests,
                self.offers.relative_duration(num_requests, self._num_context_tokens, times.total),
            )
        if self._is_priced:
            self.prices.count_step(times.is_typical)
        if self._is_left_out(outcome, times.is_typical):
            return
        context, verified = self._num_context_tokens, sum(outcome.num_verified)
        no_model = self._is_offered.all() or not any(outcome.num_drafted)
        if times.is_typical and self._explorer is None:
            num_tokens = float(num_requests)
            if self._chose_sources:
                # In a batch that nobody joins, tokens count by what they take off its end.
                num_tokens += float(self._weights @ np.asarray(outcome.num_accepted))
            was_asked = self._chose_sources or self._rests
            if was_asked and (no_model or self.offers.kind is not StepKind.ALONE):
                self.offers.observe(num_requests, context, verified, num_tokens, times)
        if self._explorer is not None:
            self.offers.interrupt()
        if times.is_typical and no_model and not self._grows_trees:
            seconds = times.total - self._looking_seconds
            self.sources.observe_pace(num_requests, context, verified, seconds)
        if self._chose_sources and not self._is_offered.all():
            self._observe_gains(outcome)
        super().observe(outcome, times)

    def _is_left_out(self, outcome: Outcome, is_typical: bool) -> bool:
        """Whether nothing is learnt from a step, as it drafted nothing, like others before it.

        Learning takes time, which counts most where drafts do not pay. Steps that looked for offers
        are never left out: those that found nothing count as much as the others. Those of a trial
        are not either, because a trial has few.
        """
        looked = self._chose_sources and not self._rests
        if looked or any(outcome.num_drafted):
            self._num_rests_in_row = 0
            return False
        if not is_typical:
            return True
        if self.prices.in_trial:
            return False
        self._num_rests_in_row += 1
        is_known = self._num_steps > self.options.warm_up and self._num_rests_in_row > 2
        return is_known and self._num_rests_in_row % _LEARN_FROM_RESTS > 0

    def _observe_gains(self, outcome: Outcome) -> None:
        """Learn how many tokens the draft model gains for different requests."""
        drafted = np.asarray(outcome.num_drafted) > 0
        drafted &= ~self._is_offered
        drafted[list(outcome.failed)] = False
        if self._explorer is not None:
            # Its draft is not one of the operating point.
            drafted[self._explorer] = False
        assert outcome.prefix_acceptance_prob is not None
        gained = outcome.prefix_acceptance_prob.cpu().double().numpy().sum(axis=1)
        requests = [self._requests[index] for index in np.flatnonzero(drafted).tolist()]
        estimate = self.prices.estimate
        if estimate is not None:
            average = estimate.tokens / len(self._requests) - 1.0
            self.sources.gains.observe(requests, gained[drafted], average)

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        self.token_weights.forget(request_ids)
