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
from draftwise.core.rules import DraftRule
from draftwise.core.types import (
    CompanionScores,
    Draft,
    Outcome,
    Plan,
    StepTimes,
)
from draftwise.errors import InvalidParameterError
from draftwise.policies.base import DraftChoice, Policy, PolicyContext
from draftwise.policies.inputs import DraftPosition, RequestState, TreeLevel
from draftwise.policies.registry import POLICIES, check_needs, create_policy, policy_class

Decision = TypeVar("Decision")


class PolicyRouter(Policy):
    """The policies of an engine: a default policy, and policies that requests choose by name.

    If all requests of a step use one policy, it handles the whole step. Otherwise each policy gets
    its part of the batch. It then learns no costs, because the step's time depends on all parts.

    Attributes:
        default: policy of requests that name none. It may be replaced between steps.
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
        self._named: dict[str, Policy] = {}
        self._parts: list[tuple[Policy, list[int]]] = []
        self._wants_scores: list[bool] = []
        self._looks: list[bool] = []
        self._size = 0

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
        return self._named[name]

    def reset(self, name: str, num_speculative_tokens: int, options: Mapping[str, Any]) -> None:
        """Replace the default policy and the maximum draft length. Learnt state is lost.

        Raises:
            InvalidParameterError: as in :meth:`get`, or the options are invalid for the policy.
        """
        context = replace(self._context, num_speculative_tokens=num_speculative_tokens)
        self.default = create_policy(name, context, options)
        self._context = context
        self.num_speculative_tokens = num_speculative_tokens
        self._named = {}

    def uses_draft_signals(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.uses_draft_signals() for policy, _ in self._parts)

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """Each policy decides for its own requests."""
        return self._joined(requests, lambda policy, own: policy.draft_lengths(own), 0)

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether any policy of the step does."""
        self._divide(requests)
        self._looks = [
            policy.looks_for_offers([requests[index] for index in indices])
            for policy, indices in self._parts
        ]
        return any(self._looks)

    def skip_drafts(self, requests: Sequence[RequestState]) -> None:
        """Each policy begins a step without drafts. The parts are those that were just asked."""
        for policy, indices in self._parts:
            policy.skip_drafts([requests[index] for index in indices])

    def plan_drafts(self, requests: Sequence[RequestState]) -> list[DraftChoice]:
        """Each policy decides for its own requests."""
        nothing = DraftChoice(0, False)
        return self._joined(requests, lambda policy, own: policy.plan_drafts(own), nothing)

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

    def _joined(
        self,
        requests: Sequence[RequestState],
        decide: Callable[[Policy, list[RequestState]], list[Decision]],
        initial: Decision,
    ) -> list[Decision]:
        """Divide the requests among the policies, and join their decisions."""
        self._divide(requests)
        decisions = [initial] * len(requests)
        for policy, indices in self._parts:
            part = decide(policy, [requests[index] for index in indices])
            for index, decision in zip(indices, part, strict=True):
                decisions[index] = decision
        return decisions

    def may_stop_drafting(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.may_stop_drafting() for policy, _ in self._parts)

    def reads_offers(self) -> bool:
        """Whether any policy of the step does."""
        return any(policy.reads_offers() for policy, _ in self._parts)

    def draft_rule(self) -> DraftRule | None:
        """The rule of the step's only policy; ``None`` if there are several."""
        return self._parts[0][0].draft_rule() if len(self._parts) == 1 else None

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

    def is_reproducible(self, request: int) -> bool:
        """The answer of the request's policy."""
        policy, own = self._policy_of(request)
        return policy.is_reproducible(own)

    def adds_offers(self, requests: Sequence[RequestState]) -> bool:
        """Whether any policy of the step does."""
        return self._any_wants(requests, lambda policy, own: policy.adds_offers(own))

    def looked_for_offers(self, seconds: float) -> None:
        """Only the step's only policy learns from it."""
        if len(self._parts) == 1:
            self._parts[0][0].looked_for_offers(seconds)

    def branches(self, requests: Sequence[RequestState]) -> bool:
        """Whether any policy of the step wants trees: all drafts of a step have one shape."""
        return self._any_wants(requests, lambda policy, own: policy.branches(own))

    def _any_wants(
        self,
        requests: Sequence[RequestState],
        wants: Callable[[Policy, list[RequestState]], bool],
    ) -> bool:
        """Divide the requests among the policies, and ask each one."""
        self._divide(requests)
        # Ask every policy, because some policies count their steps.
        wanted = [
            wants(policy, [requests[index] for index in indices]) for policy, indices in self._parts
        ]
        return any(wanted)

    def max_tree_nodes(self, requests: Sequence[RequestState]) -> list[int]:
        """Each policy decides for its own requests. One that looks for no offers has no nodes."""
        most = [0] * len(requests)
        for (policy, indices), looks in zip(self._parts, self._looks, strict=True):
            if looks:
                own = policy.max_tree_nodes([requests[index] for index in indices])
                for index, number in zip(indices, own, strict=True):
                    most[index] = number
        return most

    def least_node_value(self, request: int, num_nodes: int) -> float:
        """The answer of the request's policy."""
        policy, own = self._policy_of(request)
        return policy.least_node_value(own, num_nodes)

    def _policy_of(self, request: int) -> tuple[Policy, int]:
        """The policy of a request, and the request's index among its own."""
        for policy, indices in self._parts:
            if request in indices:
                return policy, indices.index(request)
        raise IndexError(request)

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
        return any(self._wants_scores)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Join the plans of all policies. Only policies that wanted scores get them."""
        if len(self._parts) == 1:
            return self._parts[0][0].select(
                draft, companion_scores if self._wants_scores[0] else None
            )
        lengths = [0] * self._size
        num_own = [0] * self._size
        nodes: list[tuple[int, ...]] = [()] * self._size
        replaces = chooses_nodes = False
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
            chooses_nodes |= plan.nodes is not None
            tokens[index, : plan.tokens.shape[1]] = plan.tokens
            own = plan.filtered().proposals
            if proposals is not None and own is not None:
                proposals[index, : own.shape[1]] = own
            for at, request in enumerate(indices):
                lengths[request] = plan.lengths[at]
                num_own[request] = plan.lengths[at] if plan.num_own is None else plan.num_own[at]
                first = tuple(range(plan.lengths[at]))
                nodes[request] = first if plan.nodes is None else plan.nodes[at]
        # Copied tokens are verified as such only if it is known that none was replaced.
        return Plan(
            tokens,
            tuple(lengths),
            proposals,
            tuple(num_own) if replaces else None,
            nodes=tuple(nodes) if chooses_nodes else None,
        )

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Each policy learns from its own requests."""
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
        tree_probs=None if draft.tree_probs is None else draft.tree_probs.of_requests(indices),
        tree_signals=None
        if draft.tree_signals is None
        else draft.tree_signals.of_requests(indices),
    )
