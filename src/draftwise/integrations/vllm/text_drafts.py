"""Drafts without a draft model inside another engine: continuations of the requests' own texts.

The engine keeps the texts. They are searched in its memory in every step, so there is no second
copy that would have to follow rejected tokens, preemption or requests that end. This module is
independent of vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.engine.proposers.ngram import latest_continuation
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.suffix.evidence import Evidence
from draftwise.engine.suffix.matcher import continuations_of
from draftwise.estimators.matches import MatchAcceptance
from draftwise.integrations.vllm.steps import RequestView, Verified

Integers = NDArray[np.int64]


class Texts(NamedTuple):
    """The texts of a step's requests, in the engine's memory.

    Attributes:
        tokens: ``[rows, length]`` int32, contiguous. Only the first ``num_tokens`` of each request
            are read.
        rows: ``[batch]`` row of each request.
    """

    tokens: NDArray[np.int32]
    rows: Integers


class TextProposer(ABC):
    """Proposes continuations of texts, with certainty.

    Attributes:
        name: the name that users give.
        estimates_acceptance: whether the acceptance of the proposed tokens is estimated.
    """

    name: ClassVar[str]
    estimates_acceptance: ClassVar[bool] = False

    @abstractmethod
    def propose(self, texts: Texts, views: Sequence[RequestView]) -> Proposals:
        """Propose at most ``room`` tokens for each request.

        Args:
            texts: the texts.
            views: the requests of the step.
        """

    def learn(self, results: Sequence[Verified | None]) -> None:  # noqa: B027
        """Learn from the verification of the last proposals.

        Args:
            results: the result of each request of that step; ``None`` if it is unknown.
        """


class NgramTexts(TextProposer):
    """The proposer ``ngram``."""

    name = "ngram"

    def propose(self, texts: Texts, views: Sequence[RequestView]) -> Proposals:
        """The continuation of each request's text after its latest n-gram."""
        made = Proposals.nothing(len(views), max((view.room for view in views), default=0))
        for index, (view, row) in enumerate(zip(views, texts.rows.tolist(), strict=True)):
            if view.room > 0:
                text = texts.tokens[row, : view.num_tokens].tolist()
                tokens = latest_continuation(text, view.room)
                made.tokens[index, : len(tokens)] = tokens
                made.lengths[index] = len(tokens)
        return made


class SuffixTexts(TextProposer):
    """The proposer ``suffix``, without a corpus."""

    name = "suffix"
    estimates_acceptance = True

    def __init__(self) -> None:
        """Start without observations."""
        self._acceptance = MatchAcceptance()
        self._evidence: Evidence | None = None
        self._drafting: Integers = np.zeros(0, dtype=np.int64)

    def propose(self, texts: Texts, views: Sequence[RequestView]) -> Proposals:
        """The continuations of all requests, found together."""
        limits = np.array([view.room for view in views], dtype=np.int64)
        drafting = self._drafting = np.flatnonzero(limits > 0)
        self._evidence = None
        if not len(drafting):
            return Proposals.nothing(len(views))
        chosen = [views[index] for index in drafting.tolist()]
        rows = texts.rows[drafting]
        ends = np.zeros(len(texts.tokens), dtype=np.int64)
        ends[rows] = [view.num_tokens for view in chosen]
        public = np.zeros(len(rows), dtype=np.uint64)
        found = continuations_of(texts.tokens, ends, rows, public, None, int(limits.max()))
        evidence = self._evidence = Evidence.of([view.greedy for view in chosen], found)
        made = Proposals.nothing(len(views), found.tokens.shape[1])
        made.tokens[drafting] = found.tokens
        made.lengths[drafting] = np.minimum(found.lengths, limits[drafting])
        made.acceptance[drafting] = self._acceptance.predict(*evidence)
        return made

    def learn(self, results: Sequence[Verified | None]) -> None:
        """Learn which of the proposed tokens were accepted, up to the first rejected one."""
        evidence, self._evidence = self._evidence, None
        if evidence is None:
            return
        of_drafting = [results[index] for index in self._drafting.tolist()]
        known = np.array(
            [
                0 if each is None else min(each.num_verified, each.num_accepted + 1)
                for each in of_drafting
            ],
            dtype=np.int64,
        )
        accepted = np.array([0 if each is None else each.num_accepted for each in of_drafting])
        self._acceptance.learn(*evidence, known, accepted)


def create_text_proposer(name: str) -> TextProposer:
    """Create a proposer.

    Args:
        name: one of :data:`draftwise.core.formats.MODEL_FREE_DRAFTS`.
    """
    return SuffixTexts() if name == SuffixTexts.name else NgramTexts()
