"""Drafting of blocks with the native kernels: they draw from the logits of all positions."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.core.types import Draft
from draftwise.engine.drafting.block import completed
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.drafting.native_head import NativeHeadBackend
from draftwise.engine.one_pass_head import OnePassHead
from draftwise.policies.inputs import DraftPosition


class NativeBlockBackend(NativeHeadBackend):
    """Draws the tokens of blocks over the draft's vocabulary.

    If tokens are independent of each other, one call draws all of them. Otherwise PyTorch computes
    how a position depends on the token before, and a call draws one token of each block.
    """

    def __init__(self, cached_head: OnePassHead) -> None:
        """Set up for a head. Memory is allocated by the first draft."""
        super().__init__(cached_head)
        self._head = cached_head
        self._carried = None

    @torch.inference_mode()
    def begin(self, step: DraftingStep) -> None:
        """Read waiting states and compute the blocks."""
        head = self._head
        head.expect(step.longest)
        self._prepare(step)
        predicted, _ = head.predict(step.inputs)
        assert predicted is not None
        self._next_confidence: Tensor | None = None
        self._one_by_one = not head.are_independent or (step.signals and head.estimates_confidence)
        self._anchors = dict(zip(predicted.first_rows, predicted.anchors.tolist(), strict=True))
        # Requests that do not draft have no row.
        rows = [predicted.first_rows.get(slot, 0) for slot in step.cache_slots]
        self._run.draw_from(predicted.logits, rows)

    @torch.inference_mode()
    def draw(self, active: list[int], num_tokens: int) -> int:
        """Draw tokens, for each request up to its limit."""
        run, head = self._run, self._head
        slots = [self._step.cache_slots[request] for request in active]
        run.follow(active, slots, [0] * len(active))
        if not self._one_by_one:
            run.draw(num_tokens)
            return run.num_tokens
        tokens = self._before(active, slots)
        for _ in range(num_tokens):
            head.next_rows(slots, tokens)
            run.draw(1)
            tokens = self._before(active, slots)
            if self._step.signals:
                self._next_confidence = head.next_confidence(slots, tokens)
        return run.num_tokens

    def position(self, index: int, active: list[int]) -> tuple[DraftPosition, list[bool]]:
        """A drawn position."""
        position, is_nan = super().position(index, active)
        return position.with_confidence(self._next_confidence), is_nan

    @torch.inference_mode()
    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length, over the target's vocabulary."""
        return completed(super().finish(lengths, num_tokens), self._step, self._head)

    def _before(self, active: list[int], slots: list[int]) -> Tensor:
        """``[active]`` the token before the next position."""
        count = self._run.num_tokens
        if count:
            return self._buffers.tokens[active, count - 1]
        return torch.tensor([self._anchors[slot] for slot in slots])

    def _count_entries(self, lengths: list[int], num_tokens: int) -> None:
        """Nothing: no entry of the cache stands for a drafted token."""
