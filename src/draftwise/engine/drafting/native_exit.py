"""Drafting with the native kernels of the target's first layers."""

from __future__ import annotations

import torch

from draftwise.core.types import Draft
from draftwise.engine.cached_exit import CachedExit
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.drafting.native import NativeBackend


class NativeExitBackend(NativeBackend):
    """Draws with the kernels of an exit, and keeps the residual streams that its passes leave."""

    def __init__(self, cached_exit: CachedExit) -> None:
        """Set up for an exit. Memory is allocated by the first draft."""
        super().__init__(cached_exit)
        self._exit = cached_exit

    @torch.inference_mode()
    def begin(self, step: DraftingStep) -> None:
        """Prepare the new tokens, which the first kernel call reads."""
        if self._carried is None or len(self._carried) < step.longest:
            # By position in the draft: stream of the token that the pass reads. The draft's memory
            # may be wider, as other proposers' tokens are written to it.
            size = step.longest, self._exit.num_rows, self._exit.exit.hidden_size
            self._carried = torch.empty(size)
        super().begin(step)

    @torch.inference_mode()
    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length."""
        draft = super().finish(lengths, num_tokens)
        drafted, carried = draft.host_tokens, self._carried
        assert carried is not None
        for index in self._step.active:
            # The last token of a draft was not read.
            count = max(1, lengths[index])
            request = self._step.batch.generating[index]
            read = drafted[index][: count - 1]
            self._exit.keep_drafted(request, read, carried[:count, index])
        return draft
