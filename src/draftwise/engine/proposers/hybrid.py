"""``hybrid``: known continuations and a draft model in one engine, chosen for each request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import or_

import numpy as np
import torch
from torch import Tensor

from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import Proposer, ProposerContext, TokenProposer
from draftwise.engine.proposers.model import ModelProposer
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.request import Request
from draftwise.policies.base import Policy, planned_drafts
from draftwise.policies.inputs import RequestState


class HybridProposer(Proposer):
    """Offers continuations that are known before anything is drafted; a draft model does the rest.

    In each step the policy chooses between the offer and the draft model for each request, from
    the offer's estimated acceptance and from earlier steps. It never sees what the model draws, so
    the choice cannot bias the output. The draft model is not run in a step in which it drafts for
    no request. It reads the tokens that it has missed when it drafts again.
    """

    name = "hybrid"
    summary = "known continuations or a draft model, chosen by price for each request"

    def __init__(
        self, context: ProposerContext, offers: TokenProposer, drafter: ModelProposer
    ) -> None:
        """Set up.

        Args:
            context: the context.
            offers: proposes known continuations and estimates their acceptance.
            drafter: drafts with a model.
        """
        super().__init__(context)
        self._offers, self._drafter = offers, drafter
        self.state_layers = drafter.state_layers

    def _looks_for_offers(
        self, batch: Batch, states: Sequence[RequestState], policy: Policy
    ) -> bool:
        """Whether the step looks for continuations: if a request or the policy wants them."""
        wanted = [request.speculation.draft for request in batch.generating]
        if any(name == self._offers.name for name in wanted):
            return True
        return not all(wanted) and policy.looks_for_offers(states)

    def _restrict(self, batch: Batch, made: Proposals, limits: list[int]) -> None:
        """Leave out the source that a request does not want."""
        for index, request in enumerate(batch.generating):
            wanted = request.speculation.draft
            if wanted == self._offers.name:
                limits[index] = 0
            elif wanted is not None:
                made.lengths[index] = 0

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Let the policy choose a source for each request, and join both kinds of drafts."""
        gamma, self.looking_seconds = policy.num_speculative_tokens, 0.0
        states = batch.states(self._offers.room)
        if not self._looks_for_offers(batch, states, policy):
            return self._drafter.draft(batch, policy, self._drafter.draft_limits(batch, policy))
        start = time.perf_counter()
        made = self._offers.allowed_proposals(
            batch, [min(state.draft_limit, gamma) for state in states]
        )
        limits = [state.draft_limit for state in batch.states(self._drafter.room)]
        self._restrict(batch, made, limits)
        offered = [
            state._replace(
                offer=offer,
                draft_limit=limit or len(offer),
                has_model=limit > 0,
                num_behind=self._drafter.num_behind(request),
            )
            for state, offer, limit, request in zip(
                states, made.offers(), limits, batch.generating, strict=True
            )
        ]
        lengths, copies, _ = planned_drafts(policy, offered)
        assert copies is not None
        self.looking_seconds = time.perf_counter() - start
        pairs = list(zip(lengths, copies, strict=True))
        copied = [length if is_copied else 0 for length, is_copied in pairs]
        drafted = [0 if is_copied else length for length, is_copied in pairs]
        if not any(drafted):
            if self._drafter.must_read(batch):
                self._drafter.draft(batch, policy, drafted)
            return self._offered(batch, made, copied, policy.uses_draft_signals)
        width = max(copied)
        draft = self._drafter.draft(batch, policy, drafted, width)
        return self._joined(batch, policy, draft, made, copied)

    def _joined(
        self, batch: Batch, policy: Policy, draft: Draft, made: Proposals, copied: Sequence[int]
    ) -> Draft:
        """Insert offered tokens into a draft that is wide enough."""
        rows = [index for index, length in enumerate(copied) if length]
        is_copied = tuple(length > 0 for length in copied)
        if not rows:
            return replace(draft, is_copied=is_copied)
        is_one_hot = is_copied
        if draft.is_one_hot is not None:
            is_one_hot = tuple(map(or_, is_copied, draft.is_one_hot))
        width = draft.tokens.shape[1]
        offered = self._offered(batch, made, copied, draft.signals is not None)
        tokens, signals, probs = draft.tokens, draft.signals, draft.probs
        tokens[rows, : offered.tokens.shape[1]] = offered.tokens[rows]
        if signals is not None and offered.signals is not None:
            count = offered.tokens.shape[1]
            signals.token_probs[rows, :count] = offered.signals.token_probs[rows]
            signals.entropy[rows, :count] = offered.signals.entropy[rows]
            if signals.confidence is not None:
                signals.confidence[rows, :count] = offered.signals.token_probs[rows]
        if signals is not None and policy.reads_offers:
            distributions = _with_one_hot(signals.draft_probs, tokens, copied)
            signals = replace(signals, draft_probs=distributions)
        if probs is not None and self._reads_offers(batch, policy):
            probs = _with_one_hot(probs, tokens, copied)
        lengths = np.maximum(draft.lengths, copied).tolist()
        assert max(lengths) <= width
        return replace(
            draft,
            lengths=tuple(lengths),
            probs=probs,
            signals=signals,
            is_one_hot=is_one_hot,
            is_copied=is_copied,
        )

    def _offered(
        self, batch: Batch, made: Proposals, lengths: Sequence[int], signals: bool
    ) -> Draft:
        """The draft of offered tokens alone."""
        context = self.context
        return made.draft(lengths, context.vocab_size, context.device, batch.uniforms, signals)

    @staticmethod
    def _reads_offers(batch: Batch, policy: Policy) -> bool:
        """Whether the distributions of offered tokens are read: by the policy, or by lenience."""
        return policy.reads_offers or any(lenience < 1.0 for lenience in batch.lenience)

    def admit(self, request: Request) -> None:
        """Forward to both."""
        self._offers.admit(request)
        self._drafter.admit(request)

    def commit(self, commit: Commit) -> None:
        """Forward to both."""
        self._offers.commit(commit)
        self._drafter.commit(commit)

    def retire(self, request: Request) -> None:
        """Forward to both."""
        self._offers.retire(request)
        self._drafter.retire(request)

    def recover(self, requests: Iterable[Request]) -> None:
        """Forward to both."""
        continuing = list(requests)
        self._offers.recover(continuing)
        self._drafter.recover(continuing)

    def close(self) -> None:
        """Close both."""
        self._offers.close()
        self._drafter.close()


def _with_one_hot(probs: Tensor, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    """A copy of a draft's distributions, with those of offered tokens written in.

    The draft's own memory is used again, and is cleared only where the model wrote.

    Args:
        probs: ``[batch, num_tokens, vocab]``, 0 for the offered tokens.
        tokens: ``[batch, num_tokens]`` drafted and offered tokens.
        lengths: ``[batch]`` number of offered tokens.
    """
    copy = probs.clone()
    for row, length in enumerate(lengths):
        places = torch.arange(length, device=tokens.device)
        copy[row, places, tokens[row, :length]] = 1.0
    return copy
