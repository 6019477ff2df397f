"""Several policies in one batch: each decides for its own requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftwise.core.random import StageUniforms
from draftwise.core.types import (
    Draft,
    DraftRule,
    DraftSignals,
    Judgement,
    Outcome,
    Plan,
    StepTimes,
)
from draftwise.errors import InvalidParameterError
from draftwise.policies.base import DraftPosition, Policy, PolicyContext, RequestState
from draftwise.policies.registry import POLICIES, check_needs, create_policy, policy_class


class Mixture(Policy):
    """The policies of an engine: a default one, and those that requests ask for by name.

    A step with requests of one policy is that policy's alone; otherwise each sees the part of the
    batch that is its own, and learns no costs from it: the step's time is everybody's.

    Attributes:
        default: of requests that name none; may be exchanged between steps.
    """

    name = "mixture"
    summary = "each request its own policy"
    source = "this project"

    def __init__(self, context: PolicyContext, default: Policy) -> None:
        """Set up.

        Args:
            context: for policies that are asked for later.
            default: of requests that name none.
        """
        super().__init__(context)
        self.default = default
        self._context = context
        self._named: dict[str, Policy] = {}
        self._parts: list[tuple[Policy, list[int]]] = []
        self._wishes: list[bool] = []
        self._size = 0

    def usable(self) -> list[str]:
        """Names of the policies that :meth:`get` can give."""
        names = []
        for name, policy in POLICIES.items():
            try:
                check_needs(policy, self._context)
            except InvalidParameterError:
                continue
            names.append(name)
        return names

    def get(self, name: str | None) -> Policy:
        """The policy of that name with its standard options; ``None`` for the default one.

        Raises:
            InvalidParameterError: there is none, or it cannot do without what is missing here.
        """
        if name is None or name == self.default.name:
            return self.default
        if name not in self._named:
            policy_class(name)
            self._named[name] = create_policy(name, self._context, {})
        return self._named[name]

    def reset(self, name: str, num_speculative_tokens: int, options: Mapping[str, Any]) -> None:
        """Exchange the default policy and the longest draft; what was learnt is lost.

        Raises:
            InvalidParameterError: as :meth:`get`, or the options are not the policy's.
        """
        context = replace(self._context, num_speculative_tokens=num_speculative_tokens)
        self.default = create_policy(name, context, options)
        self._context = context
        self.num_speculative_tokens = num_speculative_tokens
        self._named = {}

    def uses_draft_signals(self) -> bool:
        """Whether any of those in the step does."""
        return any(policy.uses_draft_signals() for policy, _ in self._parts)

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """Each for its own."""
        # A step that only reads prompts is the default policy's.
        members: dict[str | None, list[int]] = {} if requests else {None: []}
        for index, request in enumerate(requests):
            name = None if request.policy == self.default.name else request.policy
            members.setdefault(name, []).append(index)
        self._parts = [(self.get(name), indices) for name, indices in members.items()]
        self._wishes = [policy.judged_by_target for policy, _ in self._parts]
        self._size = len(requests)
        lengths = [0] * len(requests)
        for policy, indices in self._parts:
            part = policy.draft_lengths([requests[index] for index in indices])
            for index, length in zip(indices, part, strict=True):
                lengths[index] = length
        return lengths

    def asks_while_drafting(self) -> bool:
        """Whether any of those in the step does."""
        return any(policy.asks_while_drafting() for policy, _ in self._parts)

    def draft_rule(self) -> DraftRule | None:
        """Of the only policy in the step; several are asked."""
        return self._parts[0][0].draft_rule() if len(self._parts) == 1 else None

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Each for its own."""
        if len(self._parts) == 1:
            return self._parts[0][0].keep_drafting(position)
        going = torch.ones(len(position.requests), dtype=torch.bool)
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
                own(position.beliefs),
                own(position.entropy),
                own(position.token_probs),
                own(position.agreement),
            )
            wanted = policy.keep_drafting(part)
            if wanted is not None:
                going[active] = wanted.cpu()
        return going

    def wants_judgement(self) -> bool:
        """If any of them does."""
        self._wishes = [policy.wants_judgement() for policy, _ in self._parts]  # each is asked
        return any(self._wishes)

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """Each for its own, with what it asked for; the plans are joined."""
        if len(self._parts) == 1:
            return self._parts[0][0].select(draft, judgement if self._wishes[0] else None)
        lengths = [0] * self._size
        num_own = [0] * self._size
        tokens = draft.tokens.clone()
        proposals = None if draft.probs is None else draft.probs.clone()
        for (policy, indices), wishes in zip(self._parts, self._wishes, strict=True):
            index = torch.tensor(indices, device=draft.tokens.device)
            part = _part(draft, indices, index, policy.uses_draft_signals())
            heard = None
            if judgement is not None and wishes:
                heard = Judgement(
                    judgement.beliefs[index], judgement.overlap[index], judgement.agreement[index]
                )
            plan = policy.select(part, heard)
            tokens[index, : plan.tokens.shape[1]] = plan.tokens
            own = plan.filtered().proposals
            if proposals is not None and own is not None:
                proposals[index, : own.shape[1]] = own
            for at, request in enumerate(indices):
                lengths[request] = plan.lengths[at]
                num_own[request] = plan.lengths[at] if plan.num_own is None else plan.num_own[at]
        return Plan(tokens, tuple(lengths), proposals, tuple(num_own))

    def observe(self, outcome: Outcome, times: StepTimes) -> None:
        """Each sees what became of its own."""
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
                None if outcome.reach is None else outcome.reach[index],
                tuple(outcome.known_lengths[i] for i in indices),
            )
            policy.observe(part, replace(times, shared=True))

    def forget(self, request_ids: Collection[int]) -> None:
        """Requests that ended."""
        for policy in (self.default, *self._named.values()):
            policy.forget(request_ids)


def _part(draft: Draft, indices: list[int], index: Tensor, uses_signals: bool) -> Draft:
    """The draft of some requests, with storage of its own."""
    signals, rows = draft.signals if uses_signals else None, index.cpu()
    return Draft(
        draft.tokens[index],
        tuple(draft.lengths[i] for i in indices),
        None if draft.probs is None else draft.probs[index],
        draft.parents,
        None
        if signals is None
        else DraftSignals(
            signals.beliefs[index], signals.entropy[index], signals.token_probs[index]
        ),
        None
        if draft.stage_uniforms is None
        else StageUniforms(draft.stage_uniforms.accept[rows], draft.stage_uniforms.final[rows]),
    )
