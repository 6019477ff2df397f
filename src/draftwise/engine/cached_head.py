"""A head that drafts token by token, with its own key-value cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.engine.cached_draft_head import CachedDraftHead
from draftwise.engine.cached_model import ForwardInput, NodeInput, PackedInput, packed_nodes
from draftwise.engine.request import Request
from draftwise.models.heads.model import HeadModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.packing import PackedBatch
from draftwise.models.segment import Segment

# From so many states on, a pass of their own takes less time than it saves.
_MANY_STATES = 16


class _Carried(NamedTuple):
    """What the newest pass returned for the next token of each draft.

    Attributes:
        rows: ``[rows, hidden]``.
        places: index of each cache slot's row.
    """

    rows: Tensor
    places: dict[int, int]


class CachedHead(CachedDraftHead):
    """Runs a head that drafts token by token, and keeps its cache consistent with the requests.

    Entry i of the cache stands for token i + 1 of the request, read with the target's state at
    position i. Entries of drafted tokens were computed with the head's own output in place of
    states. The commit drops all of them, so that the head reads the accepted tokens again with the
    target's states.

    Attributes:
        head: the head.
    """

    head: HeadModel

    def __init__(self, model: HeadModel, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the head.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
        """
        super().__init__(model, cache, vocab_size)
        self.own_vocab_size, self.carried_size = model.vocab_size, model.hidden_size
        self._carried: _Carried | None = None

    def prefix_salt(self, request: Request) -> str:
        """The salt of the request and its first token, which its entries depend on, too."""
        return f"{request.tokens[0]} {super().prefix_salt(request)}"

    def prefix_text(self, request: Request) -> Sequence[int]:
        """The tokens that the entries of the cache stand for."""
        return request.tokens[1:]

    def read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """Read waiting states in one packed pass; see :meth:`CachedModel.read`."""
        logits, num_tokens = self._read(inputs)
        return None if logits is None else self.fit_vocabulary(logits), num_tokens

    def _read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """:meth:`read` with logits over the head's vocabulary."""
        packed = self.gather(inputs)
        if not packed.segments:
            return None, 0
        assert packed.states is not None
        output = self.head.read(
            self.cache, packed.tokens, packed.segments, packed.logit_rows, packed.states
        )
        if not packed.logit_rows:
            return None, len(packed.tokens)
        slots = _slots_of_rows(packed)
        self._carried = _Carried(output.carried, {slot: at for at, slot in enumerate(slots)})
        return output.logits, len(packed.tokens)

    def gather(self, inputs: Iterable[ForwardInput]) -> PackedInput:
        """Packed tokens with the target's states at the position before each.

        Of a prompt chunk that the target reads in this step there are no states yet, so only what
        earlier steps brought is read.
        """
        inputs = sorted(inputs, key=lambda each: each.request.cache_slot)
        self._catch_up(inputs)
        self._read_without_logits(inputs)
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for request, end, _, num_logits, _ in inputs:
            slot = request.cache_slot
            start, end = self._unread(request, end, num_logits)
            if start < end:
                tokens.extend(request.tokens[start + 1 : end + 1])
                segments.append(Segment(slot, start, end - start))
            rows.extend(range(len(tokens) - num_logits, len(tokens)))
        states = self._states_of(segments) if segments else None
        return PackedInput(tokens, segments, rows, states)

    def _read_without_logits(self, inputs: Sequence[ForwardInput]) -> None:
        """Read the states of which no logits are wanted in a pass of their own, if they are many.

        Of a head with one layer, the native kernels then compute keys and values only.
        """
        if self.head.native is None or len(self.head.layers) > 1:
            return
        if not any(each.num_logits for each in inputs):
            return  # the pass that follows is without logits
        requests: list[Request] = []
        segments: list[Segment] = []
        for request, end, _, num_logits, _ in inputs:
            start, end = self._unread(request, end, num_logits)
            if end - num_logits > start:
                requests.append(request)
                segments.append(Segment(request.cache_slot, start, end - num_logits - start))
        if sum(segment.num_tokens for segment in segments) >= _MANY_STATES:
            self._read_context(requests, segments)

    def _read_context(self, requests: Sequence[Request], segments: Sequence[Segment]) -> None:
        """See :meth:`CachedDraftHead._read_context`."""
        tokens: list[int] = []
        for request, (_, start, count) in zip(requests, segments, strict=True):
            tokens.extend(request.tokens[start + 1 : start + count + 1])
        self.head.read(self.cache, tokens, segments, [], self._states_of(segments))

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Read one more drafted token per cache slot; returns ``[rows, vocab]`` logits."""
        before = self._carried
        assert before is not None
        segments = [Segment(row, self.cache.lengths[row], 1) for row in rows]
        places = torch.tensor([before.places[row] for row in rows], device=self.device)
        output = self.head.read(
            self.cache, tokens, segments, range(len(rows)), carried=before.rows[places]
        )
        self._carried = _Carried(output.carried, {row: at for at, row in enumerate(rows)})
        return self.fit_vocabulary(output.logits)

    def read_roots(self, inputs: Iterable[ForwardInput]) -> Tensor:
        """Read waiting states before token trees are drafted."""
        logits, _ = self._read(inputs)
        assert logits is not None
        return logits

    def read_nodes(self, inputs: Sequence[NodeInput]) -> Tensor:
        """Read the next nodes of token trees with what was returned for their parents."""
        before = self._carried
        assert before is not None
        tokens, segments, trees, rows = packed_nodes(self.cache, inputs)
        output = self.head.read(
            self.cache,
            tokens,
            segments,
            range(len(tokens)),
            carried=before.rows[torch.tensor(rows, device=self.device)],
            trees=trees,
        )
        # No place is kept: nothing but a tree may follow.
        self._carried = _Carried(output.carried, {})
        return output.logits

    def target_tokens(self, tokens: Tensor) -> Tensor:
        """The target's ids of the head's tokens."""
        ids = self.head.target_ids
        return tokens if ids is None else ids[tokens]

    def first_carried(self) -> Tensor | None:
        """``[rows, hidden]`` what the last pass returned; see :meth:`CachedModel.first_carried`."""
        return None if self._carried is None else self._carried.rows

    def read_next(self, ids: Tensor, packed: PackedBatch, carried: Tensor | None) -> Tensor:
        """See :meth:`CachedModel.read_next`."""
        assert carried is not None
        output = self.head.read_next(ids, packed, carried)
        carried.copy_(output.carried)
        return self.fit_vocabulary(output.logits)


def _slots_of_rows(packed: PackedInput) -> list[int]:
    """The cache slot of each row of logits."""
    ends, total = [], 0
    for segment in packed.segments:
        total += segment.num_tokens
        ends.append(total)
    at, slots = 0, []
    for row in packed.logit_rows:
        while row >= ends[at]:
            at += 1
        slots.append(packed.segments[at].cache_slot)
    return slots
