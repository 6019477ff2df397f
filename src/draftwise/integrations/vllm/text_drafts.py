"""Drafts inside another engine that continue the requests' own texts.

The engine keeps the texts. Where they are on the host, they are searched in the engine's memory in
every step, so that no second copy has to follow rejected tokens, preemption or requests that end.
:class:`TextCopies` follows texts on a device. This module is independent of vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.types import Draft, DraftSignals
from draftwise.engine.proposers.ngram import latest_continuation
from draftwise.engine.proposers.proposals import Proposals
from draftwise.engine.suffix.continuing import TextContinuations
from draftwise.integrations.vllm.paged_cache import Integers, Spans, pack
from draftwise.integrations.vllm.steps import RequestView, Verified
from draftwise.kernels.native.suffix import FoundContinuations, StoredTexts

# Token ids ``[tokens]`` by the engine's row and the position of each token, on the host.
TokensAt = Callable[[Integers, Integers], NDArray[np.int32]]


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
        """Propose at most ``room`` tokens for each request."""

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


class TextCopies:
    """Host copies of the texts of generating requests. Each step copies the new tokens only.

    A request that leaves the batch is forgotten, and its whole text is copied when it comes back.
    In steps without a call, a request may leave and another one of the same name and with a prompt
    of the same length may take its row. Its copy is then wrong, which changes drafts only.
    """

    def __init__(self, num_rows: int, max_length: int) -> None:
        """Allocate memory.

        Args:
            num_rows: number of rows in which the engine stores texts.
            max_length: maximum length of a text, in tokens.
        """
        self._tokens = np.zeros((num_rows, max_length), dtype=np.int32)
        self._lengths = np.zeros(num_rows, dtype=np.int64)
        # The request of each row, as its name and the length of its prompt.
        self._owners: dict[int, tuple[str, int]] = {}

    def update(self, views: Sequence[RequestView], rows: Integers, tokens_at: TokensAt) -> Texts:
        """Copy the new tokens of all requests that can draft.

        Args:
            views: the requests of the step.
            rows: ``[batch]`` the engine's row of each request.
            tokens_at: reads tokens.
        """
        owners = {}
        for view, row in zip(views, rows.tolist(), strict=True):
            if view.room > 0:
                owner = owners[row] = view.name, view.num_tokens - view.num_output_tokens
                # A request gains at least one token before it drafts again. Otherwise this is
                # another request of the same name.
                is_known = self._owners.get(row) == owner
                if not is_known or self._lengths[row] >= view.num_tokens:
                    self._lengths[row] = 0
        self._owners = owners
        drafting = np.array([view.room > 0 for view in views], dtype=bool)
        if drafting.any():
            lengths = np.array([view.num_tokens for view in views], dtype=np.int64)[drafting]
            used = rows[drafting]
            packed = pack(Spans(used, self._lengths[used], lengths))
            new = tokens_at(packed.owners, packed.positions)
            self._tokens[packed.owners, packed.positions] = new
            self._lengths[used] = lengths
        return Texts(self._tokens, rows)


def joined(draft: Draft, copied: Draft, writes_probs: bool) -> Draft:
    """The tokens that a model drew for some requests, and those that are copied for the others.

    Args:
        draft: the draft of the model.
        copied: one-hot proposals for other requests of the same batch.
        writes_probs: whether the distributions of the copied tokens are written beside those of the
            model. Otherwise they are undefined.
    """
    rows = [row for row, count in enumerate(copied.lengths) if count]
    lengths = tuple(map(max, draft.lengths, copied.lengths))

    def merged(own: Tensor, other: Tensor | None) -> Tensor:
        made = own.new_zeros(len(own), max(lengths), *own.shape[2:])
        made[:, : own.shape[1]] = own[:, : max(lengths)]
        if other is not None:
            made[rows, : other.shape[1]] = other[rows]
        return made

    signals = None
    if draft.signals is not None and copied.signals is not None:
        own, other = draft.signals, copied.signals
        signals = DraftSignals(
            merged(own.draft_probs, other.draft_probs if writes_probs else None),
            merged(own.entropy, other.entropy),
            merged(own.token_probs, other.token_probs),
        )
    tokens = merged(draft.tokens, copied.tokens)
    return Draft(
        tokens, lengths, None, signals, is_one_hot=copied.is_one_hot, is_copied=copied.is_copied
    )
