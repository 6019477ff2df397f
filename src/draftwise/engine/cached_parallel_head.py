"""A head of P-EAGLE, with its own key-value cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.engine.cached_head import CachedHead
from draftwise.engine.cached_model import ForwardInput
from draftwise.models.heads.parallel_model import ParallelHeadModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.segment import Segment
from draftwise.models.transfer import upload


class _Predicted(NamedTuple):
    """The logits of all drafts of a step.

    Attributes:
        logits: ``[rows, draft_vocab]``, draft after draft.
        next_rows: the row of each cache slot's next position.
    """

    logits: Tensor
    next_rows: dict[int, int]


class CachedParallelHead(CachedHead):
    """Runs a head that predicts several tokens in one pass.

    Entries of the cache are those of EAGLE-3. Rows of mask tokens follow them for the time of one
    pass, and are no entries.

    Attributes:
        head: the head.
    """

    head: ParallelHeadModel
    are_independent = True

    def __init__(self, model: ParallelHeadModel, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the head.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
        """
        super().__init__(model, cache, vocab_size)
        self._num_wanted = 1
        self._predicted: _Predicted | None = None

    def expect(self, num_tokens: int) -> None:
        """Prepare the next :meth:`read`, after which at most so many positions are drawn."""
        self._num_wanted = num_tokens

    def read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """Read waiting states, and predict the tokens of the requests that draft, in one pass.

        See :meth:`draftwise.engine.cached_model.CachedModel.read`. The logits are those of the
        first position of each draft.
        """
        inputs = sorted(inputs, key=lambda each: each.request.cache_slot)
        self._catch_up(inputs, self.cache.max_new_tokens - self._num_wanted + 1)
        tokens: list[int] = []
        segments: list[Segment] = []
        states: list[Tensor] = []
        ends: list[int] = []
        counts: list[int] = []
        for request, end, _, num_logits, _ in inputs:
            slot = request.cache_slot
            start, end = self._unread(request, end, num_logits)
            if start == end:
                continue
            masks = min(self._num_wanted - 1, self.capacity - end) if num_logits else 0
            tokens += [*request.tokens[start + 1 : end + 1], *[self.head.mask_token_id] * masks]
            waiting = self._pending[slot].rows(start, end)
            states += [waiting, self.head.mask_state.to(waiting.dtype).expand(masks, -1)]
            segments.append(Segment(slot, start, end - start + masks))
            ends.append(end)
            counts.append(num_logits + masks)
        if not segments:
            return None, 0
        lasts = accumulate(segment.num_tokens for segment in segments)
        rows = [
            row
            for last, count in zip(lasts, counts, strict=True)
            for row in range(last - count, last)
        ]
        output = self.head.read(self.cache, tokens, segments, rows, torch.cat(states))
        for segment, end in zip(segments, ends, strict=True):
            self.cache.truncate(segment.cache_slot, end)
        if not rows:
            return None, len(tokens)
        firsts = accumulate(counts, initial=0)
        drafting = [
            (segment.cache_slot, first)
            for segment, count, first in zip(segments, counts, firsts, strict=False)
            if count
        ]
        self._predicted = _Predicted(output.logits, dict(drafting))
        return self._next_logits([slot for slot, _ in drafting]), len(tokens)

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of the next position of the drafts. Nothing is read for them."""
        return self._next_logits(rows)

    def _next_logits(self, slots: Sequence[int]) -> Tensor:
        predicted = self._predicted
        assert predicted is not None
        rows = [predicted.next_rows[slot] for slot in slots]
        for slot in slots:
            predicted.next_rows[slot] += 1
        index = upload(rows, torch.long, self.device)
        return self.fit_vocabulary(predicted.logits[index])
