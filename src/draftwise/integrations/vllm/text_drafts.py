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
from draftwise.engine.suffix.continuing import TextContinuations
from draftwise.integrations.vllm.steps import RequestView, Verified
from draftwise.kernels.native.suffix import FoundContinuations, StoredTexts

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
        self._continuing = TextContinuations(np.zeros((0, 0), dtype=np.int32))
        self._found: FoundContinuations | None = None

    def propose(self, texts: Texts, views: Sequence[RequestView]) -> Proposals:
        """The continuations of all requests, found together."""
        self._found = None
        limits = [view.room for view in views]
        if max(limits, default=0) <= 0:
            return Proposals.nothing(len(views))
        if self._continuing.texts.tokens is not texts.tokens:
            self._continuing.texts = StoredTexts(texts.tokens)
        stored, rows = self._continuing.texts, texts.rows.tolist()
        stored.ends[rows] = [view.num_tokens for view in views]
        stored.greedy[rows] = [view.greedy for view in views]
        found = self._found = self._continuing.find(rows, limits)
        return Proposals(found.tokens, found.lengths, found.acceptance)

    def learn(self, results: Sequence[Verified | None]) -> None:
        """Learn which of the proposed tokens were accepted, up to the first rejected one."""
        found, self._found = self._found, None
        if found is None:
            return
        known = [
            0 if each is None else min(each.num_verified, each.num_accepted + 1) for each in results
        ]
        accepted = [0 if each is None else each.num_accepted for each in results]
        self._continuing.learn(found, known, accepted)


def create_text_proposer(name: str) -> TextProposer:
    """Create a proposer.

    Args:
        name: one of :data:`draftwise.core.formats.MODEL_FREE_DRAFTS`.
    """
    return SuffixTexts() if name == SuffixTexts.name else NgramTexts()
