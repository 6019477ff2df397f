"""A head of P-EAGLE, with its own key-value cache."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from draftwise.engine.cached_head import CachedHead
from draftwise.engine.cached_model import ForwardInput
from draftwise.engine.one_pass_head import OnePassHead, Predicted
from draftwise.models.heads.parallel_model import ParallelHeadModel
from draftwise.models.memory import upload
from draftwise.models.segment import Segment


class CachedParallelHead(OnePassHead, CachedHead):
    """Runs a head that predicts several tokens in one pass.

    Entries of the cache are those of EAGLE-3. Rows of mask tokens follow them for the time of one
    pass, and are no entries.

    Attributes:
        head: the head.
    """

    head: ParallelHeadModel

    def predict(self, inputs: Iterable[ForwardInput]) -> tuple[Predicted | None, int]:
        """Read waiting states, and predict tokens, in one pass; see :class:`OnePassHead`."""
        inputs = sorted(inputs, key=lambda each: each.request.cache_slot)
        self._catch_up(inputs, self.cache.max_new_tokens - self._num_wanted + 1)
        tokens: list[int] = []
        segments: list[Segment] = []
        states: list[Tensor] = []
        ends: list[int] = []
        counts: list[int] = []
        anchors: list[int] = []
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
            if num_logits:
                anchors.append(request.tokens[end])
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
        first_rows = {
            segment.cache_slot: first
            for segment, count, first in zip(segments, counts, firsts, strict=False)
            if count
        }
        before = upload(anchors, torch.long, self.device)
        self._predicted = Predicted(output.logits, first_rows, before)
        return self._predicted, len(tokens)
