"""Drafting of blocks: one pass for all tokens, which are drawn from left to right."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftwise.core.types import Draft, DraftSignals
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.one_pass_head import OnePassHead
from draftwise.models.draft_buffers import clear_beyond


class BlockBackend(EagerBackend):
    """Draws the positions of blocks one after the other. Only the first needs a pass.

    A distribution is the one that the token before has, as it is used for drawing. So a policy may
    stop a draft by all that was drawn, as with a draft model.
    """

    def __init__(self, cached_head: OnePassHead) -> None:
        """Set up for a head. Memory is allocated by the first draft."""
        super().__init__(cached_head)
        self._head = cached_head

    def begin(self, step: DraftingStep) -> None:
        """Read waiting states and compute the blocks."""
        self._head.expect(step.longest)
        super().begin(step)

    def draw(self, active: list[int], num_tokens: int) -> int:
        """Draw one token for each active request, and estimate the acceptance of the next one."""
        drawn = super().draw(active, num_tokens)
        assert self._last is not None
        position, is_nan = self._last
        if self._step.signals and self._head.estimates_confidence:
            slots = [self._step.cache_slots[request] for request in active]
            confidence = self._head.next_confidence(slots, position.tokens)
            self._last = position.with_confidence(confidence), is_nan
        return drawn

    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length."""
        return completed(super().finish(lengths, num_tokens), self._step, self._head)


def completed(draft: Draft, step: DraftingStep, head: OnePassHead) -> Draft:
    """A draft with what the draft of a head has beside that of a model.

    These are the estimates of a confidence head, and whether tokens are proposed with certainty.

    Args:
        draft: the draft of a step.
        step: the step.
        head: the head.
    """
    if draft.signals is not None and head.estimates_confidence:
        draft = replace(draft, signals=_with_confidence(draft.signals, draft, step, head))
    if step.batch.uniforms is None or not step.is_certain:
        return draft
    return replace(draft, is_one_hot=tuple(length > 0 for length in draft.lengths))


def _with_confidence(
    signals: DraftSignals, draft: Draft, step: DraftingStep, head: OnePassHead
) -> DraftSignals:
    width = draft.tokens.shape[1]
    known = head.confidence([step.cache_slots[request] for request in step.active], width)
    if known is None:
        return signals
    confidence = torch.zeros_like(signals.entropy)
    confidence[step.active, : known.shape[1]] = known
    clear_beyond(draft.lengths, confidence)
    return replace(signals, confidence=confidence)
