"""The companion: a second small model that reads a draft in one pass and says what it thinks."""

from __future__ import annotations

from typing import Protocol

import torch

from draftwise.core.types import Draft, Judgement
from draftwise.engine.controls import history_along
from draftwise.engine.distributions import judgement
from draftwise.engine.follower import Follower, Reading
from draftwise.engine.scheduler import Batch
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
        return judgement(logits, batch.controls, lengths, history, draft)
