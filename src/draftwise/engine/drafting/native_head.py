"""Drafting with a head's native kernels, whose vocabulary may be a part of the target's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftwise.core.types import Draft
from draftwise.engine.cached_head import CachedHead
from draftwise.engine.drafting.native import NativeBackend
from draftwise.policies.base import DraftPosition


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

    def __init__(self, cached_head: CachedHead) -> None:
        """Set up for a head. Memory is allocated by the first draft."""
        super().__init__(cached_head)
        ids = self._target_ids = cached_head.head.target_ids
        self._wide: list[_WideDistributions] = []
        if ids is not None:
            sizes = cached_head.num_rows, ids, cached_head.vocab_size
            # For q, and for the draft's own distributions where they differ.
            self._wide = [_WideDistributions(*sizes) for _ in range(2)]

    def position(self, index: int, active: list[int]) -> tuple[DraftPosition, list[bool]]:
        """A drawn position, over the target's vocabulary."""
        position, is_nan = super().position(index, active)
        probs = position.draft_probs
        if not self._wide or probs is None:
            return position, is_nan
        wide = probs.new_zeros(len(probs), self._model.vocab_size)
        wide[:, self._target_ids] = probs
        scalars = position.entropy, position.token_probs
        return DraftPosition(index, active, position.tokens, wide, *scalars), is_nan

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
