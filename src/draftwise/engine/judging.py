"""The companion: a second small model that reads a draft in one pass and says what it thinks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory, beliefs, control_packed_logits
from draftwise.core.signals import agreement, overlap, token_probabilities
from draftwise.core.types import Draft, Judgement
from draftwise.engine.batch import Batch
from draftwise.engine.controls import history_along
from draftwise.engine.follower import Follower, Reading
from draftwise.engine.masks import masks_along
from draftwise.models.native import sampling as native
from draftwise.models.native.library import library_for
from draftwise.models.transfer import upload


class Judge(Protocol):
    """Says what it thinks of a step's draft."""

    def read_prompts(self, batch: Batch) -> None:
        """Follow the prompts of a step that is not judged."""

    def judge(self, batch: Batch, draft: Draft) -> Judgement:
        """What it thinks of each drafted position."""


class Companion:
    """Judges drafts in one parallel pass.

    It follows prompts without computing logits, in its own cache; what a request said while it was
    not asked it reads when it is asked again.
    """

    def __init__(self, follower: Follower, vocab_size: int) -> None:
        """Set up.

        Args:
            follower: the companion model and its cache.
            vocab_size: the target's.
        """
        self._follower = follower
        self._vocab_size = vocab_size

    def read_prompts(self, batch: Batch) -> None:
        """Follow the prompts of a step that is not judged."""
        self._follower.read(Reading(chunk.request, chunk.end) for chunk in batch.chunks)

    def judge(self, batch: Batch, draft: Draft) -> Judgement:
        """What the companion thinks of each drafted position.

        Args:
            batch: the step.
            draft: with its signals.
        """
        assert draft.signals is not None
        # Beyond its context it has nothing to say.
        room = [self._follower.capacity - len(r.tokens) + 1 for r in batch.generating]
        lengths = [max(0, min(n, space)) for n, space in zip(draft.lengths, room, strict=True)]
        readings = [Reading(chunk.request, chunk.end) for chunk in batch.chunks]
        drafted = draft.tokens.tolist()
        for index, length in enumerate(lengths):
            if length:
                # The last drafted token is judged before it is read.
                request, before_last = batch.generating[index], drafted[index][: length - 1]
                readings.append(Reading(request, len(request.tokens), before_last, length))
        logits, _ = self._follower.read(readings)
        if logits is None:
            logits = torch.zeros(0, self._vocab_size, device=self._follower.device)
        history = None
        if batch.history is not None:
            extents = upload(lengths, torch.long, logits.device)
            owner = torch.repeat_interleave(extents, output_size=len(logits))
            ends = extents.cumsum(dim=0)
            position = torch.arange(len(logits), device=logits.device) - (ends - extents)[owner]
            history = history_along(batch.history, draft.tokens, extents, owner, position)
        mask = None
        if batch.has_masks:
            mask = masks_along(batch.generating, drafted, lengths, self._vocab_size, logits.device)
        return judgement(logits, batch.controls, lengths, history, draft, mask)


def judgement(
    logits: Tensor,
    controls: LogitControls,
    lengths: list[int],
    history: TokenHistory | None,
    draft: Draft,
    mask: Tensor | None = None,
) -> Judgement:
    """What a companion thinks of a draft.

    Args:
        logits: ``[sum of lengths, vocab]`` of the companion.
        controls: one entry per request.
        lengths: ``[batch]`` leading tokens of each request's draft that it has judged.
        history: one entry per row; needed if :attr:`LogitControls.uses_history`.
        draft: with its signals.
        mask: ``[sum of lengths, vocab]``, as of the controls, one entry per row of the logits.
    """
    assert draft.signals is not None
    q = draft.signals.beliefs
    places = [(request, i) for request, length in enumerate(lengths) for i in range(length)]
    where = upload([n for place in places for n in place], torch.long, logits.device).view(-1, 2)
    library = library_for(logits.device)
    if library is not None:
        logits = control_packed_logits(logits, controls, where[:, 0], history, mask)
        return Judgement(*native.judge(library, logits, controls, where, draft.tokens, q))
    c = torch.zeros_like(q)
    if places:
        owner, position = where.unbind(dim=1)
        believed = beliefs(logits, controls.rows(owner).masked(mask), history)
        c[owner, position] = believed.nan_to_num(nan=0.0)
    c_drawn = token_probabilities(c, draft.tokens)
    return Judgement(c, overlap(q, c), agreement(draft.signals.token_probs, c_drawn))
