"""``suffix``: continues like the longest earlier occurrences of a text's last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from draftwise.models.native.suffix import FoundContinuations

Integers = NDArray[np.int64]


class _Proposed(NamedTuple):
    """The proposals of a step.

    Attributes:
        requests: the requests that may draft.
        tokens: ``[requests, width]`` proposed tokens.
        lengths: ``[requests]`` number of proposed tokens of each request.
        evidence: what their acceptance is estimated from.
    """

    requests: list[Request]
    tokens: NDArray[np.int32]
    lengths: list[int]
    evidence: Evidence

    @classmethod
    def of(cls, requests: list[Request], found: FoundContinuations) -> _Proposed:
        """The found continuations of some requests."""
        evidence = Evidence.of([request.params.temperature == 0 for request in requests], found)
        return cls(requests, found.tokens, found.lengths.tolist(), evidence)


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
        self._corpus = context.corpus
        self._matcher = SuffixMatcher(context.max_batch_size, context.max_model_len, context.corpus)
        self._acceptance = MatchAcceptance()
        self._proposed: _Proposed | None = None

    def proposals(self, batch: Batch, limits: Sequence[int]) -> Proposals:
        """The continuations of all requests, found together."""
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        self._proposed = None
        if not drafting:
            return Proposals.nothing(len(limits))
        requests = [batch.generating[index] for index in drafting]
        self._read(requests)
        slots = np.array([request.cache_slot for request in requests], dtype=np.int64)
        found = self._matcher.continuations(slots, max(limits))
        proposed = self._proposed = _Proposed.of(requests, found)
        made = Proposals.nothing(len(limits), found.tokens.shape[1])
        made.tokens[drafting] = found.tokens
        made.lengths[drafting] = np.minimum(found.lengths, np.asarray(limits)[drafting])
        made.acceptance[drafting] = self._acceptance.predict(*proposed.evidence)
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

    def commit(self, commit: Commit) -> None:
        """Learn by comparing the proposed tokens with those that the requests gained.

        The gained tokens follow the target's distribution, whatever was drafted. So this also
        learns from tokens that were not verified.
        """
        proposed = self._proposed
        starts = {
            request.request_id: start
            for request, start in zip(commit.requests, commit.starts, strict=True)
        }
        # With overlapped halves of a batch, the step of the other half may end first.
        if proposed is None or proposed.requests[0].request_id not in starts:
            return
        self._proposed = None
        known = np.zeros(len(proposed.requests), dtype=np.int64)
        accepted = known.copy()
        rows = zip(proposed.requests, proposed.tokens.tolist(), proposed.lengths, strict=True)
        for row, (request, tokens, length) in enumerate(rows):
            gained = request.tokens[starts.get(request.request_id, len(request.tokens)) :]
            count = min(length, len(gained))
            accepted[row] = _common_length(tokens[:count], gained)
            known[row] = min(count, accepted[row] + 1)
        self._acceptance.learn(*proposed.evidence, known, accepted)

    def retire(self, request: Request) -> None:
        """Store the output of a request for later ones, if outputs are remembered."""
        if self._corpus is not None and self.context.remembers_outputs:
            namespace = namespace_of(request.params.cache_salt)
            self._corpus.add(request.tokens, namespace, request.num_prompt_tokens)

    def recover(self, requests: Iterable[Request]) -> None:
        """Forget tokens after those of the last commit."""
        self._proposed = None
        for request in requests:
            self._matcher.truncate(request.cache_slot, len(request.tokens))


def _common_length(proposed: Sequence[int], gained: Sequence[int]) -> int:
    """Number of leading tokens that two texts have in common."""
    for place, (ours, theirs) in enumerate(zip(proposed, gained, strict=False)):
        if ours != theirs:
            return place
    return min(len(proposed), len(gained))
