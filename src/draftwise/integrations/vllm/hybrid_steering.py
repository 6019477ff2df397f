"""A policy in an engine that has a draft model, and whose texts are continued as well."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from draftwise.core.latency import LatencyModel
from draftwise.core.types import Draft, DraftSignals
from draftwise.engine.proposers.proposals import Proposals
from draftwise.integrations.vllm.agreement import Agreement
from draftwise.integrations.vllm.steering import ReadTexts
from draftwise.integrations.vllm.steps import RequestView, Verified
from draftwise.integrations.vllm.text_drafts import TextProposer
from draftwise.integrations.vllm.text_steering import ContinuesTexts
from draftwise.policies.base import Policy, planned_drafts
from draftwise.policies.inputs import RequestState


class HybridSteering(ContinuesTexts):
    """Chooses between a continuation of its text and the draft model for each request.

    The choice is made before the draft model draws anything. Continuations are verified like greedy
    drafts, as proposals that are certain.
    """

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
            policy, latency, agree, vocab_size: see :class:`ContinuesTexts`.
            proposer: continues texts, and estimates the acceptance of its tokens.
        """
        super().__init__(policy, latency, agree, proposer, vocab_size)
        self._made: Proposals | None = None
        self._copied: list[int] = []
        self._copies: dict[int, list[int]] = {}

    def begin(self, views: Sequence[RequestView], read_texts: ReadTexts | None = None) -> int:
        """Begin a step; see :meth:`Steering.begin`."""
        states = self._states(views)
        self._made, self._copied, self._copies = None, [0] * len(views), {}
        self._looking_seconds = 0.0
        if not self._agree(lambda: self.policy.looks_for_offers(states)):
            return self._begin(self._agree(lambda: self._policy_lengths(states)))
        assert read_texts is not None
        start = time.perf_counter()
        made = self._made = self._continuations(read_texts(), views)

        def plan() -> tuple[list[int], list[int]]:
            """Tokens of each request that are copied, and at most drawn by the draft model."""
            offered = self._offered(states, made)
            lengths, copies, scored = planned_drafts(self.policy, offered)
            assert copies is not None
            self._wants_scores = bool(scored)
            self._looking_seconds = time.perf_counter() - start
            pairs = list(zip(lengths, copies, strict=True))
            return (
                [length if is_copied else 0 for length, is_copied in pairs],
                [0 if is_copied else length for length, is_copied in pairs],
            )

        self._copied, limits = self._agree(plan)
        self._copies = {
            row: made.tokens[row, :count].tolist()
            for row, count in enumerate(self._copied)
            if count
        }
        return self._begin(limits)

    @staticmethod
    def _offered(states: Sequence[RequestState], made: Proposals) -> list[RequestState]:
        """The requests with their continuations. vLLM's draft model reads every token."""
        return [
            state._replace(offer=offer, has_model=state.draft_limit > 0)
            for state, offer in zip(states, made.offers(), strict=True)
        ]

    @property
    def copies(self) -> Mapping[int, list[int]]:
        """The continuations that were chosen, by the index of their requests."""
        return self._copies

    @property
    def looked_for_copies(self) -> bool:
        """Whether the step looked for continuations."""
        return self._made is not None

    def _draft(self) -> Draft:
        """The tokens that the model drew, and the continuations."""
        draft, made = super()._draft(), self._made
        if made is None or not any(self._copied):
            return draft
        signals = self.wants_draft_probs
        copied = made.draft(self._copied, self._vocab_size, draft.tokens.device, None, signals)
        if not any(draft.lengths):
            return copied
        rows = [row for row, count in enumerate(self._copied) if count]
        lengths = [max(pair) for pair in zip(draft.lengths, self._copied, strict=True)]
        width = max(lengths)
        tokens = _widened(draft.tokens, width)
        tokens[rows, : copied.tokens.shape[1]] = copied.tokens[rows]
        joined = None
        if draft.signals is not None and copied.signals is not None:
            own, other = draft.signals, copied.signals
            entropy, probs = _widened(own.entropy, width), _widened(own.token_probs, width)
            entropy[rows, : other.entropy.shape[1]] = other.entropy[rows]
            probs[rows, : other.token_probs.shape[1]] = other.token_probs[rows]
            draft_probs = _widened(own.draft_probs, width)
            if self.policy.reads_offers:
                for row, copy in self._copies.items():
                    draft_probs[row, range(len(copy)), copy] = 1.0
            joined = DraftSignals(draft_probs, entropy, probs)
        is_one_hot = tuple(count > 0 for count in self._copied)
        return Draft(tokens, tuple(lengths), None, joined, is_one_hot=is_one_hot)

    def _learn_drafts(self, results: Sequence[Verified | None]) -> None:
        """Learn from the continuations that were verified."""
        if self._made is not None:
            pairs = zip(results, self._copied, strict=True)
            self._proposer.learn([each if count else None for each, count in pairs])


def _widened(values: Tensor, width: int) -> Tensor:
    """``[batch, width, ...]`` the values, with zeros for the columns that they do not have."""
    made = values.new_zeros(len(values), width, *values.shape[2:])
    made[:, : values.shape[1]] = values[:, :width]
    return made
