"""``suffix``: continues like the longest earlier occurrences of a text's last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from draftwise.engine.batch import Batch
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import ProposerContext, TokenProposer
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.proposers.registry import register
from draftwise.engine.request import Request
from draftwise.engine.suffix.corpus import namespace_of
from draftwise.engine.suffix.evidence import Evidence
from draftwise.engine.suffix.matcher import SuffixMatcher
from draftwise.estimators.matches import MatchAcceptance


@register
class SuffixProposer(TokenProposer):
    """Drafts without a draft model: continues the request's own text, and texts of a corpus.

    The idea is that of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). The signals of a
    token are its estimated acceptance probability and the entropy of that estimate, so policies
    with a threshold on the draft's confidence apply.
    """

    name = "suffix"
    summary = "continues like the longest earlier occurrences of the last tokens"
    estimates_acceptance = True

    def __init__(self, context: ProposerContext) -> None:
        """Set up.

        Args:
            context: the context.
        """
        super().__init__(context)
        num_slots = context.max_batch_size
        self._corpus = context.corpus
        self._matcher = SuffixMatcher(num_slots, context.max_model_len, context.corpus)
        self._acceptance = MatchAcceptance(num_slots)
        self._evidence: Evidence | None = None
        self._drafting: list[Request] = []

    def proposals(self, batch: Batch, limits: Sequence[int]) -> Proposals:
        """The continuations of all requests, found together."""
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        self._evidence, self._drafting = None, [batch.generating[index] for index in drafting]
        if not drafting:
            return Proposals.nothing(len(limits))
        self._read(self._drafting)
        slots = np.array([request.cache_slot for request in self._drafting], dtype=np.int64)
        found = self._matcher.continuations(slots, max(limits))
        greedy = [request.params.temperature == 0 for request in self._drafting]
        evidence = self._evidence = Evidence.of(slots, greedy, found)
        expected = self._acceptance.predict(*evidence)
        made = Proposals.nothing(len(limits), found.tokens.shape[1])
        made.tokens[drafting] = found.tokens
        made.lengths[drafting] = np.minimum(found.lengths, np.asarray(limits)[drafting])
        made.acceptance[drafting] = expected
        return made

    def _read(self, requests: Iterable[Request]) -> None:
        """Append the requests' new tokens to their texts."""
        for request in requests:
            slot = request.cache_slot
            self._matcher.extend(slot, request.tokens[self._matcher.length(slot) :])

    def admit(self, request: Request) -> None:
        """Read the prompt."""
        namespace = namespace_of(request.params.cache_salt)
        self._matcher.begin(request.cache_slot, request.tokens, namespace)
        self._acceptance.begin(request.cache_slot)

    def commit(self, commit: Commit) -> None:
        """Learn from the verified tokens."""
        evidence, self._evidence = self._evidence, None
        if evidence is None:
            return
        results = {
            request.request_id: (len(request.tokens) - 1 - start, num_verified)
            for request, start, num_verified in zip(
                commit.requests, commit.starts, commit.num_drafted, strict=True
            )
            if num_verified
        }
        at, known, accepted = [], [], []
        for row, request in enumerate(self._drafting):
            gained, num_verified = results.get(request.request_id, (-1, 0))
            if gained < 0:
                continue
            num_accepted = min(gained, num_verified)
            # A request that ended may have been cut after a token that was accepted.
            is_cut = request.finish_reason is not None
            at.append(row)
            known.append(num_accepted if is_cut else min(num_verified, num_accepted + 1))
            accepted.append(num_accepted)
        if at:
            rows = np.array(at, dtype=np.int64)
            self._acceptance.learn(*evidence.rows(rows), np.array(known), np.array(accepted))

    def retire(self, request: Request) -> None:
        """Store the output of a request for later ones, if outputs are remembered."""
        if self._corpus is not None and self.context.remembers_outputs:
            namespace = namespace_of(request.params.cache_salt)
            self._corpus.add(request.tokens, namespace, request.num_prompt_tokens)

    def recover(self, requests: Iterable[Request]) -> None:
        """Forget tokens after those of the last commit."""
        self._evidence = None
        for request in requests:
            self._matcher.truncate(request.cache_slot, len(request.tokens))
