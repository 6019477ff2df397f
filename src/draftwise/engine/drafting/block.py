"""Drafting of blocks: one pass for all tokens, which are drawn from left to right."""

from __future__ import annotations

from dataclasses import replace

from draftwise.core.types import Draft
from draftwise.engine.cached_block_head import CachedBlockHead
from draftwise.engine.cached_parallel_head import CachedParallelHead
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.loop import DraftingStep

# Heads that compute all logits of a draft in one pass.
OnePassHead = CachedBlockHead | CachedParallelHead


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

    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length."""
        draft = super().finish(lengths, num_tokens)
        if self._step.batch.uniforms is None or not self._step.is_certain:
            return draft
        return replace(draft, is_one_hot=tuple(length > 0 for length in draft.lengths))
