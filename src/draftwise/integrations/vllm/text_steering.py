"""A policy in an engine whose drafts continue the requests' own texts, without a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftwise.core.latency import LatencyModel
from draftwise.engine.proposers.proposals import Proposals, planned_lengths, stopped_draft
from draftwise.integrations.vllm.agreement import Agreement
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView, Verified
from draftwise.integrations.vllm.text_drafts import TextProposer, Texts
from draftwise.policies.base import Policy
from draftwise.policies.inputs import RequestState


class ContinuesTexts(Steering):
    """A base class for engines whose texts are continued, with or without a draft model."""

    def __init__(
        self,
        policy: Policy,
        latency: LatencyModel | None,
        agree: Agreement,
        proposer: TextProposer,
        vocab_size: int,
    ) -> None:
        """Set up.

        Args:
            policy, latency, agree: see :class:`Steering`.
            proposer: continues texts.
            vocab_size: the target's vocabulary size.
        """
        super().__init__(policy, latency, agree)
        self._proposer = proposer
        self._vocab_size = vocab_size

    def _continuations(self, texts: Texts, views: Sequence[RequestView]) -> Proposals:
        """The continuations of all requests, without tokens that do not exist."""
        made = self._proposer.propose(texts, views)
        made.cut_at_vocabulary(self._vocab_size)
        return made


class TextSteering(ContinuesTexts):
    """Finds continuations of all requests and selects among them, in one call for each step.

    All proposals are known before the policy decides. They depend on the texts only, so a decision
    may compare all of them, and never sees a token that is drawn at random.
    """

    def propose(
        self, views: Sequence[RequestView], texts: Texts, clock: Callable[[], float]
    ) -> list[list[int]]:
        """The tokens of each request to verify.

        Args:
            views: the requests of the step.
            texts: their texts.
            clock: the time in seconds.
        """
        start = clock()
        estimates = self._proposer.estimates_acceptance
        states = self._states(views)
        if estimates:
            states = [state._replace(has_model=False) for state in states]
        looks = not estimates or self._agree(lambda: self.policy.looks_for_offers(states))
        made = self._continuations(texts, views) if looks else Proposals.nothing(len(views))
        found = clock()
        select_seconds = 0.0

        def select() -> tuple[tuple[int, ...], tuple[int, ...]]:
            nonlocal select_seconds
            chosen = self._select(states, made)
            select_seconds = clock() - found
            return chosen

        num_drafted, selected = self._agree(select)
        lengths = self._send(selected, num_drafted, found - start, select_seconds)
        return [row[:n] for row, n in zip(made.tokens.tolist(), lengths, strict=True)]

    def _select(
        self, states: Sequence[RequestState], made: Proposals
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The policy's draft lengths, and how many of these tokens it verifies."""
        if self._proposer.estimates_acceptance:
            limits = planned_lengths(made, states, self.policy)
        else:
            wanted = zip(self._policy_lengths(states), made.lengths.tolist(), strict=True)
            limits = [min(each) for each in wanted]
        host = torch.device("cpu")
        draft = stopped_draft(made, limits, self.policy, self._vocab_size, host, None)
        return draft.lengths, tuple(self.policy.select(draft, None).lengths)

    def _learn_drafts(self, results: Sequence[Verified | None]) -> None:
        self._proposer.learn(results)
