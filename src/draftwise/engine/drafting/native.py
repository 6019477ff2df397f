"""Drafting with native kernels that read, compute and draw in one call.

All positions are drafted in one call if the policy is not asked after each token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.types import Draft
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.kernels.native.drafting import DraftRun
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.policies.inputs import DraftPosition


class NativeBackend:
    """Draws with the kernels of a Llama-like draft model on a CPU."""

    def __init__(self, cached_model: CachedModel) -> None:
        """Set up for a draft model. Memory is allocated by the first draft."""
        self._model = cached_model
        self._buffers = DraftBuffers(0, 0, 0)
        # Converts distributions to the target's vocabulary, if they are over another one.
        self._widen: Callable[[Tensor], Tensor] | None = None
        self._carried: Tensor | None = None
        self._is_unfinished = False
        if cached_model.carried_size:
            self._carried = torch.empty(cached_model.num_rows, cached_model.carried_size)

    def serves(self, step: DraftingStep) -> bool:
        """Whether the model has kernels and no grammar restricts the tokens."""
        return self._model.native is not None and not step.is_masked

    def conditions(self, step: DraftingStep) -> tuple[LogitControls, TokenHistory | None]:
        """Sampling parameters and token history, in the ids of the draft's vocabulary."""
        return step.batch.controls, step.batch.token_history

    @torch.inference_mode()
    def begin(self, step: DraftingStep) -> None:
        """Prepare the new tokens, which the first kernel call reads."""
        model, cache = self._model, self._model.cache
        self._prepare(step)
        # Number of entries in the cache before the first token is drawn.
        self._num_read = [
            model.text_end(request, length)
            for request, length in zip(step.batch.generating, step.text_lengths, strict=True)
        ]
        tokens, segments, logit_tokens, states, _ = model.gather(step.inputs)
        cache.begin_pass(segments)
        self._run.read(tokens, segments, logit_tokens, states)
        cache.advance_all(segments)

    def _prepare(self, step: DraftingStep) -> None:
        """Prepare the memory of a step, and the run of its kernels."""
        model, cache = self._model, self._model.cache
        native = model.native
        assert native is not None
        if not self._buffers.fits(len(step.limits), step.width):
            self._buffers = DraftBuffers(model.num_rows, step.width, model.own_vocab_size)
        if self._is_unfinished:
            # The kernels may have written distributions of a draft that was interrupted.
            self._buffers.distrust()
        self._is_unfinished = True
        uniforms = step.batch.uniforms if step.is_sampled else None
        controls, token_history = self.conditions(step)
        self._step = step
        self._run = DraftRun(
            native,
            cache,
            self._buffers,
            controls,
            token_history,
            None if uniforms is None else uniforms.draft,
            step.signals,
            step.limits,
            self._carried,
        )

    @torch.inference_mode()
    def draw(self, active: list[int], num_tokens: int) -> int:
        """Draw tokens in one call, for each request up to its limit."""
        step, run = self._step, self._run
        slots = [step.cache_slots[request] for request in active]
        read = [self._num_read[request] + run.num_tokens - 1 for request in active]
        recurrent = self._model.cache.recurrent
        if recurrent is not None:
            written = zip(slots, read, [num_tokens] * len(slots), strict=True)
            recurrent.begin_pass(written)
        run.follow(active, slots, read)
        run.draw(num_tokens)
        return run.num_tokens

    def decided_lengths(self) -> dict[int, int]:
        """All draft lengths: the kernels apply limits and NaN checks."""
        return dict(enumerate(self._run.lengths.tolist()))

    def position(self, index: int, active: list[int]) -> tuple[DraftPosition, list[bool]]:
        """A drawn position."""
        buffers = self._buffers
        is_nan: list[bool] = buffers.is_nan[active, index].bool().tolist()
        return self._step.position(buffers, index, active, self._widen), is_nan

    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length."""
        self._count_entries(lengths, num_tokens)
        step = self._step
        # The kernels write zeros for a token whose logits are NaN.
        draft = step.collect(self._buffers, lengths, num_tokens, self._run.lengths.tolist())
        self._is_unfinished = False
        return draft

    def _count_entries(self, lengths: list[int], num_tokens: int) -> None:
        """Set the cache's lengths to what was read of the draft."""
        step, cache, is_nan = self._step, self._model.cache, self._buffers.is_nan
        for request in step.active:
            # The last drawn token was not read, whether it was drafted or its logits were NaN.
            length = lengths[request]
            drawn = length + int(length < num_tokens and is_nan[request, length])
            cache.advance(step.cache_slots[request], self._num_read[request] + drawn - 1)
