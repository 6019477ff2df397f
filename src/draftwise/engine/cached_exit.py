"""An early exit of the target, which drafts or judges on the target's own cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftwise.engine.cached_model import CachedModel, ForwardInput, PackedInput
from draftwise.engine.kept_states import KeptStates
from draftwise.engine.lifecycle import Commit
from draftwise.engine.request import Request
from draftwise.models.exits.model import ExitModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.segment import Segment


class CachedExit(CachedModel):
    """Runs an exit on the target's cache and keeps the residual streams that it leaves.

    The target's passes compute the exit's layers of every prompt and every kept token, so the exit
    never lags. In a step it reads each request's newest token, which the target has not read yet,
    and drafted tokens after it. It writes their keys and values to the target's memory beyond the
    target's length. What is not accepted is overwritten later.

    Attributes:
        exit: the exit.
    """

    def __init__(
        self, model: ExitModel, target_cache: KVCache, vocab_size: int, kept: KeptStates
    ) -> None:
        """Set up.

        Args:
            model: the exit.
            target_cache: the target's cache.
            vocab_size: the target's vocabulary size.
            kept: receives the streams that the exit leaves.
        """
        super().__init__(model, target_cache.sharing(), vocab_size)
        self.exit = model
        self._target_cache = target_cache
        self._kept = kept

    def num_behind(self, request: Request) -> int:
        """0: the target has read all tokens but the newest."""
        return 0

    def admit(self, request: Request) -> None:
        """A request uses the cache slot from now on."""
        self._kept.forget(request.cache_slot)

    def commit(self, commit: Commit) -> None:
        """Drop what was kept for the step. The target's cache was rolled back already."""
        for request in commit.requests:
            self._kept.forget(request.cache_slot)

    def recover(self, requests: Iterable[Request]) -> None:
        """Drop what was kept for a step that failed."""
        for request in requests:
            self._kept.forget(request.cache_slot)

    def read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """Read new tokens, from where a less deep exit has left them.

        See :meth:`CachedModel.read`.
        """
        packed = self.gather(inputs)
        if not packed.segments:
            return None, 0
        output = self._kept.run(
            self.cache, packed.tokens, packed.segments, packed.logit_rows, self.exit
        )
        assert output.logits is not None
        assert output.stream is not None
        first = 0
        for slot, start, count in packed.segments:
            end = first + count
            self._keep(slot, start, packed.tokens[first:end], output.stream[first:end])
            first = end
        return self.fit_vocabulary(output.logits), len(packed.tokens)

    def gather(self, inputs: Iterable[ForwardInput]) -> PackedInput:
        """Packed tokens from the target's length on. The target reads prompt chunks itself."""
        wanted = [each for each in inputs if each.num_logits]
        for request, *_ in wanted:
            slot = request.cache_slot
            self.cache.lengths[slot] = self._target_cache.lengths[slot]
        return super().gather(wanted)

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Read one more token per cache slot; returns ``[rows, vocab]`` logits."""
        segments = [Segment(row, self.cache.lengths[row], 1) for row in rows]
        logits, stream = self.exit.leave(self.cache, tokens, segments)
        assert logits is not None
        assert stream is not None
        for at, (slot, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            self._kept.extend(slot, token, stream[at : at + 1])
        return self.fit_vocabulary(logits)

    def keep_drafted(self, request: Request, drafted: Sequence[int], rows: Tensor) -> None:
        """Keep what a draft of the native kernels left.

        Args:
            request: the request.
            drafted: drafted tokens that were read after the request's newest token.
            rows: ``[1 + drafted, hidden]`` streams of the newest token and of these.
        """
        start = len(request.tokens) - 1
        self._keep(request.cache_slot, start, [request.tokens[-1], *drafted], rows)

    def assume_drafted(self, request: Request, drafted: Sequence[int]) -> None:
        """Prepare a measurement: the newest token and drafted tokens were read."""
        size = 1 + len(drafted), self.exit.hidden_size
        dtype = self.exit.dtype if self.exit.native is None else torch.float32
        self.keep_drafted(request, drafted, torch.ones(size, dtype=dtype, device=self.device))

    def _keep(self, slot: int, start: int, tokens: Sequence[int], rows: Tensor) -> None:
        self._kept.keep(slot, self.exit.num_layers, start, tokens, rows)

    def has_static_steps(self, num_tokens: int) -> bool:
        """False: recorded steps compute all layers of a model."""
        return False
