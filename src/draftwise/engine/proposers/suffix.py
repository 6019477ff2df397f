"""``suffix``: continues like the longest earlier occurrences of a text's last tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import ProposerContext, TokenProposer
from draftwise.engine.proposers.by_name import register
from draftwise.engine.proposers.proposals import Proposals, ProposedTree
from draftwise.engine.request import Request
from draftwise.engine.suffix.branching import SuffixTree
from draftwise.engine.suffix.corpus import namespace_of
from draftwise.engine.suffix.matcher import SuffixMatcher
from draftwise.kernels.native.suffix import FoundContinuations
from draftwise.policies.base import Policy


class _Proposed(NamedTuple):
    """The proposals of a step.

    Attributes:
        requests: the requests of the step.
        starts: ``[requests]`` their lengths before the step, in tokens.
        lengths: ``[requests]`` number of proposed tokens of each request.
        found: the proposed tokens, or the proposed trees.
    """

    requests: Sequence[Request]
    starts: list[int]
    lengths: list[int]
    found: FoundContinuations | list[SuffixTree]


@register
class SuffixProposer(TokenProposer):
    """Drafts without a draft model: continues the request's own text, and texts of a corpus.

    The idea is that of SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). The signals of a
    token are its estimated acceptance probability and the entropy of that estimate, so policies
    with a threshold on the draft's confidence apply.
    """

    name = "suffix"
    summary = "continues like the longest earlier occurrences of the last tokens"
    drafts_trees = True
    estimates_acceptance = True

    def __init__(self, context: ProposerContext) -> None:
        """Set up."""
        super().__init__(context)
        self._corpus = context.corpus
        self._matcher = SuffixMatcher(context.max_batch_size, context.max_model_len, context.corpus)
        self._proposed: _Proposed | None = None
        self._branches = False

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Propose the continuations that the policy wants, as chains or as trees."""
        self._branches = self.context.tree_width > 1 and batch.may_branch
        return super().propose(batch, policy)

    def proposals(self, batch: Batch, limits: Sequence[int]) -> Proposals:
        """The continuations of all requests, found together."""
        self._proposed = None
        if max(limits, default=0) <= 0:
            return Proposals.nothing(len(limits))
        requests = batch.generating
        self._read(requests)
        slots = [request.cache_slot for request in requests]
        if self._branches:
            return self._trees(requests, slots, limits)
        found = self._matcher.continuations(slots, limits)
        lengths = found.lengths.tolist()
        if any(lengths):
            starts = [len(request.tokens) for request in requests]
            self._proposed = _Proposed(requests, starts, lengths, found)
        return Proposals(found.tokens, found.lengths, found.acceptance)

    def _trees(
        self, requests: Sequence[Request], slots: list[int], limits: Sequence[int]
    ) -> Proposals:
        """A tree of continuations of each request."""
        trees = self._matcher.continuing.find_trees(slots, limits, self.context.tree_width)
        made = Proposals.of_trees(
            [ProposedTree(tree.tokens, tree.parents, tree.values) for tree in trees]
        )
        if made.lengths.any():
            starts = [len(request.tokens) for request in requests]
            self._proposed = _Proposed(requests, starts, made.lengths.tolist(), trees)
        return made

    def _read(self, requests: Iterable[Request]) -> None:
        """Append the requests' new tokens to their texts."""
        for request in requests:
            slot = request.cache_slot
            self._matcher.extend(slot, request.tokens[self._matcher.length(slot) :])

    def admit(self, request: Request) -> None:
        """Read the prompt."""
        params = request.params
        namespace, greedy = namespace_of(params.cache_salt), params.temperature == 0
        self._matcher.begin(request.cache_slot, request.tokens, namespace, greedy)

    def commit(self, commit: Commit) -> None:
        """Learn by comparing the proposed tokens with those that the requests gained.

        The gained tokens follow the target's distribution, whatever was drafted. So this also
        learns from tokens that were not verified.
        """
        proposed = self._proposed
        # With overlapped halves of a batch, the step of the other half may end first.
        if proposed is None or not any(r is proposed.requests[0] for r in commit.requests):
            return
        self._proposed = None
        if isinstance(proposed.found, list):
            of_trees = zip(proposed.requests, proposed.starts, proposed.found, strict=True)
            for request, start, tree in of_trees:
                if tree.tokens:
                    gained = request.tokens[start:]
                    self._matcher.continuing.learn_tree(request.cache_slot, tree, gained)
            return
        known, accepted = [], []
        rows = zip(
            proposed.requests,
            proposed.starts,
            proposed.lengths,
            proposed.found.tokens.tolist(),
            strict=True,
        )
        for request, start, length, tokens in rows:
            gained = request.tokens[start : start + length]
            same = _common_length(tokens, gained)
            accepted.append(same)
            known.append(min(len(gained), same + 1))
        self._matcher.learn(proposed.found, known, accepted)

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
    """Number of leading tokens of ``gained`` that are the proposed ones."""
    for place, token in enumerate(gained):
        if token != proposed[place]:
            return place
    return len(gained)
