"""``suffix``: continues like the longest earlier occurrences of a text's last tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from draftwise.engine.batch import Batch
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import Proposal, ProposerContext, TokenProposer
from draftwise.engine.proposers.registry import register
from draftwise.engine.request import Request
from draftwise.engine.suffix_matching import SuffixMatcher
from draftwise.estimators.matches import MatchAcceptance


@register
class SuffixProposer(TokenProposer):
    """Drafts without a draft model, from the request's own prompt and output.

    The idea is that of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). The signals of a
    token are its estimated acceptance probability and the entropy of that estimate, so policies
    with a threshold on the draft's confidence apply.
    """

    name = "suffix"
    summary = "continues like the longest earlier occurrences of the last tokens"

    def __init__(self, context: ProposerContext) -> None:
        """Set up.

        Args:
            context: the context.
        """
        super().__init__(context)
        self._matcher = SuffixMatcher(context.max_batch_size, context.max_model_len)
        self._acceptance = MatchAcceptance()
        # For each slot: the shares and the match length of the last draft.
        self._drafted: dict[int, tuple[list[float], int]] = {}

    def proposals(self, batch: Batch, limits: list[int]) -> list[Proposal]:
        """The continuations of all requests, found together."""
        drafting = [index for index, limit in enumerate(limits) if limit]
        proposed = [Proposal(()) for _ in limits]
        self._drafted.clear()
        if not drafting:
            return proposed
        requests = [batch.generating[index] for index in drafting]
        self._read(requests)
        slots = [request.cache_slot for request in requests]
        found = self._matcher.continuations(slots, max(limits))
        greedy = np.array([request.params.temperature == 0 for request in requests])
        expected = self._acceptance.predict(found.shares, found.match_lengths, greedy)
        for row, (index, slot) in enumerate(zip(drafting, slots, strict=True)):
            if found.match_lengths[row]:
                count = limits[index]
                proposed[index] = Proposal(
                    found.tokens[row, :count].tolist(), expected[row, :count].tolist()
                )
                shares = found.shares[row, :count].tolist()
                self._drafted[slot] = shares, int(found.match_lengths[row])
        return proposed

    def _read(self, requests: Iterable[Request]) -> None:
        """Append the requests' new tokens to their texts."""
        for request in requests:
            slot = request.cache_slot
            self._matcher.extend(slot, request.tokens[self._matcher.length(slot) :])

    def admit(self, request: Request) -> None:
        """Read the prompt."""
        self._matcher.begin(request.cache_slot, request.tokens)

    def commit(self, commit: Commit) -> None:
        """Learn from the verified tokens."""
        for request, start, num_verified in zip(
            commit.requests, commit.starts, commit.num_drafted, strict=True
        ):
            shares, match_length = self._drafted.pop(request.cache_slot, ((), 0))
            num_accepted = min(len(request.tokens) - 1 - start, num_verified)
            if num_accepted < 0 or not num_verified:
                continue
            known = min(num_verified, num_accepted + 1)
            # A request that ended may have been cut after a token that was accepted.
            if request.finish_reason is not None:
                known = num_accepted
            self._acceptance.learn(
                shares[:known], match_length, request.params.temperature == 0, num_accepted
            )

    def recover(self, requests: Iterable[Request]) -> None:
        """Forget tokens after those of the last commit."""
        self._drafted.clear()
        for request in requests:
            self._matcher.truncate(request.cache_slot, len(request.tokens))
