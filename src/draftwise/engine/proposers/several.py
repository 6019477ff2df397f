"""Several proposers in one engine. One of them is chosen for each request and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import Proposer, ProposerContext
from draftwise.engine.request import Request
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.policies.base import DraftPosition, Policy, RequestState

# Chooses the proposer of each generating request: returns one index per request. It may only use
# information from earlier steps.
Choice = Callable[[Batch], Sequence[int]]


class SeveralProposers(Proposer):
    """Divides the requests of each step among proposers, and joins their drafts."""

    name = "several"
    summary = "each request's draft comes from the proposer that is chosen for the step"

    def __init__(
        self, context: ProposerContext, proposers: Sequence[Proposer], choose: Choice
    ) -> None:
        """Set up.

        Args:
            context: the context.
            proposers: at least one.
            choose: returns the index of the proposer for each generating request of a step.
        """
        super().__init__(context)
        self._proposers = list(proposers)
        self._choose = choose
        self._buffers = DraftBuffers(0, 0, 0)

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Each proposer drafts for its requests."""
        chosen = list(self._choose(batch))
        by_context = [batch.states(proposer.room) for proposer in self._proposers]
        states = [by_context[proposer_index][index] for index, proposer_index in enumerate(chosen)]
        limits = [
            min(n, state.draft_limit)
            for n, state in zip(policy.draft_lengths(states), states, strict=True)
        ]
        parts = []
        for proposer_index, proposer in enumerate(self._proposers):
            own = [
                index for index, chosen_index in enumerate(chosen) if chosen_index == proposer_index
            ]
            # Every proposer reads every prompt, because it may be chosen for the request later.
            if own or batch.chunks:
                view = _PolicyView(policy, own, [limits[index] for index in own])
                parts.append((own, proposer.propose(batch.part(own, batch.chunks), view)))
        return self._joined(batch, policy, parts)

    def _joined(self, batch: Batch, policy: Policy, parts: list[tuple[list[int], Draft]]) -> Draft:
        context, lengths = self.context, [0] * len(batch.generating)
        for own, draft in parts:
            for index, length in zip(own, draft.lengths, strict=True):
                lengths[index] = length
        width = max(lengths, default=0)
        if not width:
            return Draft.empty(len(lengths), context.device)
        signals = policy.uses_draft_signals()
        if not self._buffers.fits(len(lengths), width):
            self._buffers = DraftBuffers(
                self.context.max_batch_size, width, self.context.vocab_size, self.context.device
            )
        sampled = any(draft.probs is not None for _, draft in parts)
        for own, draft in parts:
            self._buffers.put(own, draft, signals)
            if sampled and draft.probs is None:
                self._put_one_hot(own, draft.tokens)
        uniforms = batch.uniforms
        stage = None if uniforms is None else uniforms.stage
        made = self._buffers.draft(lengths, width, stage, sampled, signals, signals)
        if not sampled:
            return made
        is_one_hot = [False] * len(lengths)
        for own, draft in parts:
            for index in own:
                is_one_hot[index] = draft.probs is None
        return replace(made, is_one_hot=tuple(is_one_hot))

    def _put_one_hot(self, own: list[int], tokens: Tensor) -> None:
        for column in range(tokens.shape[1]):
            self._buffers.probs[own, column] = 0.0
            self._buffers.probs[own, column, tokens[:, column]] = 1.0

    def admit(self, request: Request) -> None:
        """Forward to all proposers."""
        for proposer in self._proposers:
            proposer.admit(request)

    def commit(self, commit: Commit) -> None:
        """Forward to all proposers."""
        for proposer in self._proposers:
            proposer.commit(commit)

    def retire(self, request: Request) -> None:
        """Forward to all proposers."""
        for proposer in self._proposers:
            proposer.retire(request)

    def recover(self, requests: Iterable[Request]) -> None:
        """Forward to all proposers."""
        continuing = list(requests)
        for proposer in self._proposers:
            proposer.recover(continuing)

    def close(self) -> None:
        """Close all proposers."""
        for proposer in self._proposers:
            proposer.close()


class _PolicyView(Policy):
    """A policy as one proposer sees it: draft lengths are fixed, and requests are renumbered."""

    name = "view"
    summary = "the policy of a step, for some of its requests"
    source = "this project"

    def __init__(self, policy: Policy, own: list[int], limits: list[int]) -> None:
        self.num_speculative_tokens = policy.num_speculative_tokens
        self._policy, self._own, self._limits = policy, own, limits

    def uses_draft_signals(self) -> bool:
        return self._policy.uses_draft_signals()

    def may_stop_drafting(self) -> bool:
        return self._policy.may_stop_drafting()

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        return self._limits

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        return self._policy.keep_drafting(
            DraftPosition(
                position.index,
                [self._own[request] for request in position.requests],
                position.tokens,
                position.draft_probs,
                position.entropy,
                position.token_probs,
                position.agreement,
            )
        )
