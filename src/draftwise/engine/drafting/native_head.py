"""Drafting with a head's native kernels, whose vocabulary may be a part of the target's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.types import Draft
from draftwise.engine.cached_draft_head import CachedDraftHead
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.drafting.native import NativeBackend


class _WideDistributions:
    """Distributions over the target's vocabulary, 0 outside the draft's.

    Only the draft's tokens are ever written, so that the memory is cleared once.
    """

    def __init__(self, num_requests: int, target_ids: Tensor, vocab_size: int) -> None:
        self._ids, self._vocab_size, self._num_requests = target_ids, vocab_size, num_requests
        self._memory = torch.zeros(num_requests, 0, vocab_size)

    def of(self, probs: Tensor) -> Tensor:
        """``[batch, columns, vocab]`` of ``[batch, columns, draft_vocab]``, a view."""
        batch, columns, _ = probs.shape
        if self._memory.shape[1] < columns:
            self._memory = torch.zeros(self._num_requests, columns, self._vocab_size)
        view = self._memory[:batch, :columns]
        view[:, :, self._ids] = probs
        return view


class NativeHeadBackend(NativeBackend):
    """Draws with the kernels of a head.

    Tokens are drawn over the draft's vocabulary. The distributions of a draft are widened to the
    target's vocabulary once, when it is complete.
    """

    def __init__(self, cached_head: CachedDraftHead) -> None:
        """Set up for a head. Memory is allocated by the first draft."""
        super().__init__(cached_head)
        ids = self._target_ids = cached_head.head.target_ids
        self._wide: list[_WideDistributions] = []
        if ids is not None:
            sizes = cached_head.num_rows, ids, cached_head.vocab_size
            # For q, and for the draft's own distributions where they differ.
            self._wide = [_WideDistributions(*sizes) for _ in range(2)]
            self._widen = self._widened
            # Tokens that the draft does not have get an id that is none of its vocabulary.
            self._own_ids = torch.full((cached_head.vocab_size,), len(ids))
            self._own_ids[ids] = torch.arange(len(ids))

    def conditions(self, step: DraftingStep) -> tuple[LogitControls, TokenHistory | None]:
        """Sampling parameters and token history, in the ids of the draft's vocabulary."""
        controls, history = super().conditions(step)
        if not self._wide:
            return controls, history
        if controls.bias_tokens is not None:
            controls = replace(controls, bias_tokens=self._own_ids[controls.bias_tokens])
        if history is not None:
            history = replace(history, tokens=self._own_ids[history.tokens])
        return controls, history

    def _widened(self, probs: Tensor) -> Tensor:
        """``[rows, vocab]`` of ``[rows, draft_vocab]``, in new memory."""
        wide = probs.new_zeros(len(probs), self._model.vocab_size)
        wide[:, self._target_ids] = probs
        return wide

    @torch.inference_mode()
    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length, over the target's vocabulary."""
        draft = super().finish(lengths, num_tokens)
        if not self._wide:
            return draft
        q, own = self._wide
        probs, signals = draft.probs, draft.signals
        wide = None if probs is None else q.of(probs)
        if signals is not None:
            shares = probs is not None and not self._step.own_draft_probs
            shown = wide[:, :-1] if shares and wide is not None else own.of(signals.draft_probs)
            signals = replace(signals, draft_probs=shown)
        return replace(draft, probs=wide, signals=signals)
