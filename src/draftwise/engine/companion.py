"""The companion: a second small model that scores a draft in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftwise.core.rejection import packed_rows
from draftwise.core.sampling import (
    LogitControls,
    TokenHistory,
    control_packed_logits,
    soft_probabilities,
)
from draftwise.core.signals import agreement, overlap, token_probabilities
from draftwise.core.types import CompanionScores, Draft
from draftwise.engine.batch import Batch, token_history_along
from draftwise.engine.cached_model import CachedModel, ForwardInput
from draftwise.engine.lifecycle import Commit, FollowsRequests
from draftwise.engine.masks import masks_along
from draftwise.engine.request import Request
from draftwise.kernels.native import sampling as native
from draftwise.kernels.native.library import library_for
from draftwise.models.memory import upload


class Companion(FollowsRequests, Protocol):
    """Scores drafts before the target verifies them."""

    def read_prompts(self, batch: Batch) -> None:
        """Read the prompt chunks of a step whose draft is not scored."""

    def score(self, batch: Batch, draft: Draft) -> CompanionScores | None:
        """Score each drafted position; ``None`` if nothing can be scored."""

    def close(self) -> None:
        """Release memory, threads and processes."""


class CompanionModel:
    """Scores drafts in one forward pass.

    It reads prompts without computing logits. Tokens that a request gained in unscored steps are
    read in the next scored step.
    """

    def __init__(self, cached_model: CachedModel, vocab_size: int) -> None:
        """Set up.

        Args:
            cached_model: the companion model and its cache.
            vocab_size: the target's vocabulary size.
        """
        self._cached_model = cached_model
        self._vocab_size = vocab_size
        self.admit = cached_model.admit
        self.commit = cached_model.commit
        self.recover = cached_model.recover

    def retire(self, request: Request) -> None:
        """The cache slot is cleared when it is given to the next request."""

    def close(self) -> None:
        """The model and its cache are released with this object."""

    def read_prompts(self, batch: Batch) -> None:
        """Read the prompt chunks of a step whose draft is not scored."""
        self._cached_model.read(ForwardInput(chunk.request, chunk.end) for chunk in batch.chunks)

    def score(self, batch: Batch, draft: Draft) -> CompanionScores | None:
        """Score each drafted position.

        Args:
            batch: the step's batch.
            draft: the draft, with its signals.
        """
        assert draft.signals is not None
        drafted = draft.host_tokens
        # Positions beyond the companion's context are not scored.
        lengths = [
            self._cached_model.num_scored(request, tokens[:length])
            for request, tokens, length in zip(
                batch.generating, drafted, draft.lengths, strict=True
            )
        ]
        inputs = [ForwardInput(chunk.request, chunk.end) for chunk in batch.chunks]
        for index, length in enumerate(lengths):
            if length:
                # The last drafted token is scored by the logits before it, so it need not be read.
                request, before_last = batch.generating[index], drafted[index][: length - 1]
                inputs.append(ForwardInput(request, len(request.tokens), before_last, length))
        logits, _ = self._cached_model.read(inputs)
        if logits is None:
            logits = torch.zeros(0, self._vocab_size, device=self._cached_model.device)
        token_history = None
        if batch.token_history is not None:
            extents = upload(lengths, torch.long, logits.device)
            owner, position = packed_rows(extents - 1, len(logits))
            token_history = token_history_along(
                batch.token_history, draft.tokens[owner], owner, position
            )
        mask = None
        if batch.has_masks:
            mask = masks_along(batch.generating, drafted, lengths, self._vocab_size, logits.device)
        return companion_scores(logits, batch.controls, lengths, token_history, draft, mask)


class SeveralCompanions:
    """Companions that score the same drafts, for studies that compare them.

    Policies see the scores of the first one.

    Attributes:
        scores: the scores of the latest draft, by companion.
    """

    def __init__(self, companions: Sequence[Companion]) -> None:
        """Set up with at least one companion."""
        self._companions = list(companions)
        self.scores: list[CompanionScores | None] = []

    def admit(self, request: Request) -> None:
        """See :class:`FollowsRequests`."""
        for each in self._companions:
            each.admit(request)

    def commit(self, commit: Commit) -> None:
        """See :class:`FollowsRequests`."""
        for each in self._companions:
            each.commit(commit)

    def retire(self, request: Request) -> None:
        """See :class:`FollowsRequests`."""
        for each in self._companions:
            each.retire(request)

    def recover(self, requests: Iterable[Request]) -> None:
        """See :class:`FollowsRequests`."""
        requests = list(requests)
        for each in self._companions:
            each.recover(requests)

    def read_prompts(self, batch: Batch) -> None:
        """Read the prompt chunks of a step whose draft is not scored."""
        for each in self._companions:
            each.read_prompts(batch)

    def score(self, batch: Batch, draft: Draft) -> CompanionScores | None:
        """Score each drafted position with every companion."""
        self.scores = [each.score(batch, draft) for each in self._companions]
        return self.scores[0]

    def close(self) -> None:
        """Release memory, threads and processes."""
        for each in self._companions:
            each.close()


def companion_scores(
    logits: Tensor,
    controls: LogitControls,
    lengths: list[int],
    token_history: TokenHistory | None,
    draft: Draft,
    mask: Tensor | None = None,
) -> CompanionScores:
    """The companion's scores of a draft.

    Args:
        logits: ``[sum of lengths, vocab]`` logits of the companion.
        controls: one entry per request.
        lengths: ``[batch]`` number of leading draft tokens that it scored.
        token_history: one entry per row; needed if :attr:`LogitControls.uses_token_history`.
        draft: the draft, with its signals.
        mask: ``[sum of lengths, vocab]``, added to the logits; see :class:`LogitControls`.
    """
    assert draft.signals is not None
    q = draft.signals.draft_probs
    places = [(request, i) for request, length in enumerate(lengths) for i in range(length)]
    where = upload([n for place in places for n in place], torch.long, logits.device).view(-1, 2)
    library = library_for(logits.device)
    if library is not None:
        logits = control_packed_logits(logits, controls, where[:, 0], token_history, mask)
        return CompanionScores(
            *native.score_draft(library, logits, controls, where, draft.tokens, q)
        )
    c = torch.zeros_like(q)
    if places:
        owner, position = where.unbind(dim=1)
        probs = soft_probabilities(logits, controls.rows(owner).masked(mask), token_history)
        c[owner, position] = probs.nan_to_num(nan=0.0)
    c_drawn = token_probabilities(c, draft.tokens)
    return CompanionScores(c, overlap(q, c), agreement(draft.signals.token_probs, c_drawn))
