"""Several policies in one batch. Each policy decides for its own requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwise.core.types import (
    CompanionScores,
    Draft,
    Outcome,
    Plan,
    StepTimes,
)
from draftwise.errors import InvalidParameterError
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, planned_drafts
from draftwise.policies.catalogue import POLICIES, check_needs, create_policy, policy_class
from draftwise.policies.guard import Guard
from draftwise.policies.inputs import DraftPosition, RequestState


class PolicyRouter(Policy):
    """The policies of an engine: a default policy, and policies that requests choose by name.

    If all requests of a step use one policy, it handles the whole step. Otherwise each policy gets
    its part of the batch. It then learns no costs, because the step's time depends on all parts.

    A guard shortens what the policies want to draft, see :mod:`draftwise.policies.guard`.

    Attributes:
        default: policy of requests that name none. It may be replaced between steps.
        guard: estimates step times, and keeps the account; ``None`` without step costs.
    """

    name = "mixture"
    summary = "one policy per request"
    source = "this project"

    def __init__(self, context: PolicyContext, default: Policy) -> None:
        """Set up.

        Args:
            context: context in which later policies are created.
            default: policy of requests that name none.
        """
        super().__init__(context)
        self.default = default
        self._context = context
        self._begin_account()
        self._named: dict[str, Policy] = {}
        self._parts: list[tuple[Policy, list[int]]] = []
        self._wants_scores: list[bool] = []
        self._looked = self._rests = False
        # The requests of a step that has begun with looks_for_offers.
        self._asked: Sequence[RequestState] | None = None
        self._size = 0

    def _begin_account(self) -> None:
        """Give the default policy a new guard."""
        latency = self._context.latency
        self.guard = None if latency is None else Guard(latency, self._context.guarded)
        self.default.guard = self.guard

    def usable(self) -> list[str]:
        """Names of the policies that :meth:`get` supports."""
        names = []
        for name, policy in POLICIES.items():
            try:
                check_needs(policy, self._context)
            except InvalidParameterError:
                continue
            names.append(name)
        return names

    def get(self, name: str | None) -> Policy:
        """The policy with a name and its default options; ``None`` for the default policy.

        Raises:
            InvalidParameterError: no policy has this name, or a requirement of it is missing.
        """
        if name is None or name == self.default.name:
            return self.default
        if name not in self._named:
            policy_class(name)
            self._named[name] = create_policy(name, self._context, {})
            self._named[name].guard = self.guard
        return self._named[name]

    def reset(self, name: str, num_speculative_tokens: int, options: Mapping[str, Any]) -> None:
        """Replace the default policy and the maximum draft length. Learnt state is lost.

        Raises:
            InvalidParameterError: as in :meth:`get`, or the options are invalid for the policy.
        """
        context = replace(self._context, num_speculative_tokens=num_speculative_tokens)
        self.default = create_policy(name, context, options)
        self._context = context
        self._begin_account()
        self.num_speculative_tokens = num_speculative_tokens
        self._named = {}

    @property
    def uses_draft_signals(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.uses_draft_signals for policy, _ in self._parts)

    @property
    def may_stop_drafting(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.may_stop_drafting for policy, _ in self._parts)

    @property
    def wants_companion(self) -> bool:
        """Whether any policy of the step lets the companion score the draft."""
        return any(self._wants_scores)

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether any policy of the step does. A step that rests looks for nothing."""
        self._divide(requests)
        self._asked, self._looked = requests, False
        if not self._rests and (self.guard is None or self.guard.affords_looking()):
            # Ask every policy, because some policies count their steps.
            wanted = [policy.looks_for_offers(_own(requests, own)) for policy, own in self._parts]
            self._looked = any(wanted)
        return self._looked

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """Each policy decides for its own requests, and the guard for all of them."""
        if requests is not self._asked:
            self._divide(requests)
        self._asked = None
        if self._rests and any(state.has_model or state.offer for state in requests):
            # The policies begin a step in which they cannot draft.
            requests = [state._replace(draft_limit=0, offer=()) for state in requests]
        lengths, copies = [0] * self._size, [False] * self._size
        scored = False
        for part, (policy, own) in enumerate(self._parts):
            plan = planned_drafts(policy, _own(requests, own))
            self._wants_scores[part] |= bool(plan.scored)
            scored |= bool(plan.scored)
            assert plan.copies is not None
            for index, length, is_copied in zip(own, plan.lengths, plan.copies, strict=True):
                lengths[index], copies[index] = length, is_copied
        if self.guard is not None:
            looked = self._looked and not any(request.has_model for request in requests)
            self.guard.looked, self.guard.scored = looked, scored
            by_model = [not is_copied for is_copied in copies]
            trees = self._context.drafts_trees
            lengths = self.guard.shortened(lengths, by_model, scored, trees)
        self._looked = False
        return DraftPlan(lengths, copies, scored)

    def _divide(self, requests: Sequence[RequestState]) -> None:
        """Begin a step: divide the requests among the policies."""
        # The default policy handles steps that only read prompts.
        members: dict[str | None, list[int]] = {} if requests else {None: []}
        for index, request in enumerate(requests):
            name = None if request.policy == self.default.name else request.policy
            members.setdefault(name, []).append(index)
        self._parts = [(self.get(name), indices) for name, indices in members.items()]
        self._wants_scores = [policy.uses_target_oracle for policy, _ in self._parts]
        self.reads_offers = any(policy.reads_offers for policy, _ in self._parts)
        self._size = len(requests)
        self._rests = False
        if self.guard is not None:
            self.guard.begin(requests)
            # The step drafts nothing, so that its time can be compared with others.
            self._rests = self.guard.rests(any(policy.needs_latency for policy, _ in self._parts))

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Each policy decides for its own requests."""
        if len(self._parts) == 1:
            return self._parts[0][0].keep_drafting(position)
        continues = torch.ones(len(position.requests), dtype=torch.bool)
        for policy, own in self._parts:
            place = {request: at for at, request in enumerate(own)}
            active = [at for at, request in enumerate(position.requests) if request in place]
            if active:
                wanted = policy.keep_drafting(position.of(active, place))
                if wanted is not None:
                    continues[active] = wanted.cpu()
        return continues

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Join the plans of all policies. Only policies that wanted scores get them."""
        if len(self._parts) == 1:
            scores = companion_scores if self._wants_scores[0] else None
            return self._parts[0][0].select(draft, scores)
        lengths, num_own, replaces = [0] * self._size, [0] * self._size, False
        tokens = draft.tokens.clone()
        proposals = None if draft.probs is None else draft.probs.clone()
        for (policy, own), wants_scores in zip(self._parts, self._wants_scores, strict=True):
            index = torch.tensor(own, device=draft.tokens.device)
            scores = None
            if companion_scores is not None and wants_scores:
                scores = companion_scores.of_requests(index)
            part = draft.of_requests(own, policy.uses_draft_signals)
            plan = policy.select(part, scores)
            replaces |= plan.num_own is not None
            tokens[index, : plan.tokens.shape[1]] = plan.tokens
            if proposals is not None and plan.proposals is not None:
                proposals[index, : plan.proposals.shape[1]] = plan.proposals
            for at, request in enumerate(own):
                lengths[request] = plan.lengths[at]
                num_own[request] = plan.lengths[at] if plan.num_own is None else plan.num_own[at]
        # Copied tokens are verified as such only if it is known that none was replaced.
        return Plan(tokens, tuple(lengths), proposals, tuple(num_own) if replaces else None)

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """The guard learns from the step, and each policy from its own requests."""
        if self.guard is not None:
            self.guard.observe(outcome, times)
        if len(self._parts) == 1:
            self._parts[0][0].observe(outcome, times)
        elif outcome.acceptance is not None:
            shared = replace(times, disturbed=True, looking=0.0)
            for policy, own in self._parts:
                policy.observe(outcome.of_requests(own), shared)

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        for policy in (self.default, *self._named.values()):
            policy.forget(request_ids)


def _own(requests: Sequence[RequestState], indices: Sequence[int]) -> Sequence[RequestState]:
    """The requests of one policy."""
    if len(indices) == len(requests):
        return requests
    return [requests[index] for index in indices]
