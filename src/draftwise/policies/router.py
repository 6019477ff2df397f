"""Several policies in one batch. Each policy decides for its own requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.random import StageUniforms
from draftwise.core.types import (
    CompanionScores,
    Draft,
    Outcome,
    Plan,
    StepTimes,
)
from draftwise.errors import InvalidParameterError
from draftwise.policies.base import DraftChoice, Policy, PolicyContext
from draftwise.policies.catalogue import POLICIES, check_needs, create_policy, policy_class
from draftwise.policies.guard import Guard
from draftwise.policies.inputs import DraftPosition, RequestState, TreeLevel

Decision = TypeVar("Decision")


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
        self._looks: list[bool] = []
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

    def uses_draft_signals(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.uses_draft_signals() for policy, _ in self._parts)

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """Each policy decides for its own requests, and the guard for all of them."""
        self._divide(requests)
        if self._rests:
            self.skip_drafts(requests)
            return [0] * len(requests)
        lengths = self._joined(requests, lambda policy, own: policy.draft_lengths(own), 0)
        return self._affordable(lengths, [request.has_model for request in requests])

    def _affordable(self, lengths: list[int], by_model: list[bool]) -> list[int]:
        """What the guard leaves of draft lengths."""
        alone = self._parts[0][0] if len(self._parts) == 1 else None
        if self.guard is None or (alone is not None and alone.asks_guard):
            return lengths
        scored = any(policy.needs_companion for policy, _ in self._parts)
        return self.guard.shortened(lengths, by_model, scored, self._context.drafts_trees)

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether any policy of the step does."""
        self._divide(requests)
        self._looks = [False] * len(self._parts)
        if not self._rests:
            self._looks = [
                policy.looks_for_offers(_own(requests, indices)) for policy, indices in self._parts
            ]
        return any(self._looks)

    def skip_drafts(self, requests: Sequence[RequestState]) -> None:
        """Each policy begins a step without drafts. The parts are those that were just asked."""
        for policy, indices in self._parts:
            policy.skip_drafts(_own(requests, indices))

    def plan_drafts(self, requests: Sequence[RequestState]) -> list[DraftChoice]:
        """Each policy decides for its own requests, and the guard for all of them."""
        nothing = DraftChoice(0, False)
        self._divide(requests)
        if self._rests:
            self.skip_drafts(requests)
            return [nothing] * len(requests)
        choices = self._joined(requests, lambda policy, own: policy.plan_drafts(own), nothing)
        if self.guard is not None:
            self.guard.looked = not any(request.has_model for request in requests)
        lengths = self._affordable(
            [choice.length for choice in choices], [not choice.uses_offer for choice in choices]
        )
        pairs = zip(choices, lengths, strict=True)
        return [choice._replace(length=length) for choice, length in pairs]

    def _divide(self, requests: Sequence[RequestState]) -> None:
        """Begin a step: divide the requests among the policies."""
        # The default policy handles steps that only read prompts.
        members: dict[str | None, list[int]] = {} if requests else {None: []}
        for index, request in enumerate(requests):
            name = None if request.policy == self.default.name else request.policy
            members.setdefault(name, []).append(index)
        self._parts = [(self.get(name), indices) for name, indices in members.items()]
        self._wants_scores = [policy.uses_target_oracle for policy, _ in self._parts]
        self._size = len(requests)
        if self.guard is not None:
            self.guard.begin(requests)

    @property
    def _rests(self) -> bool:
        """Whether the step drafts nothing, so that its time can be compared with others."""
        prices = any(policy.needs_latency for policy, _ in self._parts)
        return self.guard is not None and self.guard.rests(prices)

    def _joined(
        self,
        requests: Sequence[RequestState],
        decide: Callable[[Policy, Sequence[RequestState]], list[Decision]],
        initial: Decision,
    ) -> list[Decision]:
        """Join the policies' decisions."""
        decisions = [initial] * len(requests)
        for policy, indices in self._parts:
            part = decide(policy, _own(requests, indices))
            for index, decision in zip(indices, part, strict=True):
                decisions[index] = decision
        return decisions

    def may_stop_drafting(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.may_stop_drafting() for policy, _ in self._parts)

    def reads_offers(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.reads_offers() for policy, _ in self._parts)

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Each policy decides for its own requests."""
        if len(self._parts) == 1:
            return self._parts[0][0].keep_drafting(position)
        continues = torch.ones(len(position.requests), dtype=torch.bool)
        for policy, indices in self._parts:
            place = {request: at for at, request in enumerate(indices)}
            active = [at for at, request in enumerate(position.requests) if request in place]
            if not active:
                continue
            index = torch.tensor(active, device=position.tokens.device)

            def own(values: Tensor | None, index: Tensor = index) -> Tensor | None:
                return None if values is None else values[index]

            part = DraftPosition(
                position.index,
                [place[position.requests[at]] for at in active],
                position.tokens[index],
                own(position.draft_probs),
                own(position.entropy),
                own(position.token_probs),
                own(position.agreement),
            )
            wanted = policy.keep_drafting(part)
            if wanted is not None:
                continues[active] = wanted.cpu()
        return continues

    def adds_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether any policy of the step does."""
        return self._any_wants(requests, lambda policy, own: policy.adds_offers(own))

    def looked_for_offers(self, seconds: float) -> None:
        """The guard learns from it, and the step's only policy."""
        if self.guard is not None:
            self.guard.looking_seconds = seconds
        if len(self._parts) == 1 and not self._rests:
            self._parts[0][0].looked_for_offers(seconds)

    def _any_wants(
        self,
        requests: Sequence[RequestState],
        wants: Callable[[Policy, Sequence[RequestState]], bool],
    ) -> bool:
        """Divide the requests among the policies, and ask each one.

        A step that rests wants nothing.
        """
        self._divide(requests)
        if self._rests:
            return False
        # Ask every policy, because some policies count their steps.
        wanted = [wants(policy, _own(requests, indices)) for policy, indices in self._parts]
        return any(wanted)

    def max_tree_nodes(self, requests: Sequence[RequestState]) -> list[int]:
        """Each policy decides for its own requests. One that looks for no offers has no nodes."""
        most = [0] * len(requests)
        for (policy, indices), looks in zip(self._parts, self._looks, strict=True):
            if looks:
                own = policy.max_tree_nodes(_own(requests, indices))
                for index, number in zip(indices, own, strict=True):
                    most[index] = number
        return self._affordable(most, [request.has_model for request in requests])

    def grow_trees(self, level: TreeLevel) -> NDArray[np.bool_] | None:
        """Each policy decides for its own requests."""
        if len(self._parts) == 1:
            return self._parts[0][0].grow_trees(level)
        grows = np.ones(len(level.requests), dtype=bool)
        for policy, indices in self._parts:
            place = {request: at for at, request in enumerate(indices)}
            nodes = [at for at, request in enumerate(level.requests) if request in place]
            if not nodes:
                continue
            part = level._replace(
                requests=[place[level.requests[at]] for at in nodes],
                values=level.values[nodes],
                entropy=None if level.entropy is None else level.entropy[nodes],
            )
            wanted = policy.grow_trees(part)
            if wanted is not None:
                grows[nodes] = wanted
        return grows

    def wants_companion(self) -> bool:
        """Whether any policy of the step wants the companion."""
        # Call every policy, because some policies count their steps.
        self._wants_scores = [policy.wants_companion() for policy, _ in self._parts]
        if self.guard is not None:
            self.guard.scored = any(self._wants_scores)
        return any(self._wants_scores)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Join the plans of all policies. Only policies that wanted scores get them."""
        if len(self._parts) == 1:
            return self._parts[0][0].select(
                draft, companion_scores if self._wants_scores[0] else None
            )
        lengths = [0] * self._size
        num_own = [0] * self._size
        replaces = False
        tokens = draft.tokens.clone()
        proposals = None if draft.probs is None else draft.probs.clone()
        for (policy, indices), wants_scores in zip(self._parts, self._wants_scores, strict=True):
            index = torch.tensor(indices, device=draft.tokens.device)
            part = _part(draft, indices, index, policy.uses_draft_signals())
            scores = None
            if companion_scores is not None and wants_scores:
                scores = CompanionScores(
                    companion_scores.probs[index],
                    companion_scores.overlap[index],
                    companion_scores.agreement[index],
                )
            plan = policy.select(part, scores)
            replaces |= plan.num_own is not None
            tokens[index, : plan.tokens.shape[1]] = plan.tokens
            own = plan.proposals
            if proposals is not None and own is not None:
                proposals[index, : own.shape[1]] = own
            for at, request in enumerate(indices):
                lengths[request] = plan.lengths[at]
                num_own[request] = plan.lengths[at] if plan.num_own is None else plan.num_own[at]
        # Copied tokens are verified as such only if it is known that none was replaced.
        return Plan(
            tokens,
            tuple(lengths),
            proposals,
            tuple(num_own) if replaces else None,
        )

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """The guard learns from the step, and each policy from its own requests."""
        if self.guard is not None:
            self.guard.observe(outcome, times)
        if len(self._parts) == 1:
            self._parts[0][0].observe(outcome, times)
            return
        if outcome.acceptance is None:
            return
        for policy, indices in self._parts:
            index = torch.tensor(indices, device=outcome.acceptance.device)
            part = Outcome(
                tuple(outcome.num_drafted[i] for i in indices),
                tuple(outcome.num_verified[i] for i in indices),
                tuple(outcome.num_accepted[i] for i in indices),
                tuple(outcome.next_tokens[i] for i in indices),
                outcome.acceptance[index],
                frozenset(at for at, i in enumerate(indices) if i in outcome.failed),
                None
                if outcome.prefix_acceptance_prob is None
                else outcome.prefix_acceptance_prob[index],
                tuple(outcome.known_lengths[i] for i in indices),
                paths=None if outcome.paths is None else tuple(outcome.paths[i] for i in indices),
            )
            policy.observe(part, replace(times, disturbed=True))

    def forget(self, request_ids: Collection[int]) -> None:
        """Delete the state of ended requests."""
        for policy in (self.default, *self._named.values()):
            policy.forget(request_ids)


def _own(requests: Sequence[RequestState], indices: Sequence[int]) -> Sequence[RequestState]:
    """The requests of one policy."""
    if len(indices) == len(requests):
        return requests
    return [requests[index] for index in indices]


def _part(draft: Draft, indices: list[int], index: Tensor, uses_signals: bool) -> Draft:
    """The draft of some requests, with its own storage."""
    signals, rows = draft.signals if uses_signals else None, index.cpu()
    if signals is not None:
        signals = signals.of_requests(index)
    return Draft(
        draft.tokens[index],
        tuple(draft.lengths[i] for i in indices),
        None if draft.probs is None else draft.probs[index],
        signals,
        None
        if draft.stage_uniforms is None
        else StageUniforms(draft.stage_uniforms.accept[rows], draft.stage_uniforms.final[rows]),
        None if draft.is_one_hot is None else tuple(draft.is_one_hot[i] for i in indices),
        None if draft.parents is None else draft.parents[index],
    )
