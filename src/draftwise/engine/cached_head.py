"""A drafting head with its own key-value cache, and the target's states that it has not read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.engine.cached_model import (
    CachedModel,
    ForwardInput,
    NodeInput,
    PackedInput,
    packed_nodes,
)
from draftwise.engine.lifecycle import Commit, StateRows
from draftwise.engine.request import Request
from draftwise.models.heads.model import HeadModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.packing import PackedBatch
from draftwise.models.segment import Segment

# A request that does not draft is read when this many of its states wait.
_MAX_PENDING = 256


class _Pending:
    """States of one request that the head may still have to read.

    Attributes:
        first: position of the first state.
        end: position after the last state.
    """

    def __init__(self) -> None:
        self.first = self.end = 0
        self._parts: list[StateRows] = []

    def restart(self, position: int) -> None:
        """Drop all states. The next one is that of a position."""
        self.first = self.end = position
        self._parts = []

    def append(self, states: StateRows) -> None:
        """Add states that follow the last one. Those that were added before are left out."""
        known = max(0, self.end - states.start)
        if states.length > known:
            start, source, first, length = states
            self._parts.append(StateRows(start + known, source, first + known, length - known))
            self.end = start + length

    def rows(self, start: int, end: int) -> Tensor:
        """``[end - start, size]`` the states of consecutive positions."""
        if len(self._parts) > 1:
            rows = torch.cat([part.rows for part in self._parts])
            self._parts = [StateRows(self.first, rows, 0, len(rows))]
        return self._parts[0].rows[start - self.first : end - self.first]

    def drop_before(self, position: int) -> None:
        """Drop the states before a position."""
        while self._parts and self.first + self._parts[0].length <= position:
            self.first += self._parts.pop(0).length


class _Carried(NamedTuple):
    """What the newest pass returned for the next token of each draft.

    Attributes:
        rows: ``[rows, hidden]``.
        places: index of each cache slot's row.
    """

    rows: Tensor
    places: dict[int, int]


class CachedHead(CachedModel):
    """Runs a head and keeps its cache and the target's states consistent with the requests.

    Entry i of the cache stands for token i + 1 of the request, read with the target's state at
    position i. A step's commit brings the states of the tokens that the target has read and kept.
    The head reads them before it drafts for the request again. Entries of drafted tokens were
    computed with the head's own output in place of states. The commit drops all of them, so that
    the head reads the accepted tokens again with the target's states.

    Attributes:
        head: the head.
    """

    def __init__(self, model: HeadModel, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the head.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
        """
        super().__init__(model, cache, vocab_size)
        self.head = model
        self.state_layers = model.state_layers
        self.own_vocab_size, self.carried_size = model.vocab_size, model.hidden_size
        self._pending = [_Pending() for _ in range(self.num_rows)]
        # Requests of which states were lost when a step was interrupted.
        self._lost: set[int] = set()
        self._carried: _Carried | None = None

    def text_end(self, request: Request, end: int) -> int:
        """The number of entries after the head has read the first ``end`` tokens."""
        return end - 1

    def room(self, request: Request) -> int:
        """Maximum number of tokens that it can draft after the request's text.

        It is 0 where states were lost.
        """
        slot = request.cache_slot
        if slot in self._lost or self._pending[slot].end < len(request.tokens) - 1:
            return 0
        return super().room(request)

    def num_behind(self, request: Request) -> int:
        """Number of a request's tokens that the head has not read yet, besides the newest."""
        return max(0, len(request.tokens) - 2 - self.cache.lengths[request.cache_slot])

    def is_overdue(self, request: Request) -> bool:
        """Whether so many states wait that the head reads them although it does not draft."""
        slot = request.cache_slot
        waiting = self._pending[slot].end - self.cache.lengths[slot]
        return waiting >= _MAX_PENDING and slot not in self._lost

    def prefix_salt(self, request: Request) -> str:
        """The salt of the request and its first token, which its entries depend on, too."""
        return f"{request.tokens[0]} {super().prefix_salt(request)}"

    def prefix_text(self, request: Request) -> Sequence[int]:
        """The tokens that the entries of the cache stand for."""
        return request.tokens[1:]

    def prefix_end(self, request: Request, end: int) -> int:
        """The number of entries for a prefix: one for each state of the target."""
        return end

    def admit(self, request: Request) -> None:
        """Clear the request's cache slot and its states."""
        super().admit(request)
        self._pending[request.cache_slot].restart(0)
        self._lost.discard(request.cache_slot)

    def restored(self, cache_slot: int) -> None:
        """A prefix was copied to a cache slot. The target's next states follow it."""
        super().restored(cache_slot)
        self._pending[cache_slot].restart(self.cache.lengths[cache_slot])

    def commit(self, commit: Commit) -> None:
        """Drop the entries of drafted tokens and keep the target's new states."""
        for request, states in zip(commit.requests, _compact(commit.states), strict=True):
            slot, pending = request.cache_slot, self._pending[request.cache_slot]
            self.cache.truncate(slot, pending.end)
            self._committed[slot] = self.cache.lengths[slot]
            pending.drop_before(self.cache.lengths[slot])
            if states is not None and states.start <= pending.end:
                pending.append(states)
            elif states is not None:
                self._lost.add(slot)

    def recover(self, requests: Iterable[Request]) -> None:
        """Roll back to the last commit."""
        for request in requests:
            slot = request.cache_slot
            if not self._roll_back(slot, min(self._pending[slot].end, self._committed[slot])):
                # The states of what the rings have dropped are gone.
                self._lost.add(slot)

    def assume_read(self, cache_slot: int, length: int) -> None:
        """Prepare a measurement: the entries of a cache slot are valid, and one more state waits.

        Args:
            cache_slot: the cache slot.
            length: number of entries.
        """
        self.cache.assume(cache_slot, length)
        rows = torch.zeros(1, self.head.state_size, dtype=self.head.dtype, device=self.device)
        self._pending[cache_slot].restart(length)
        self._pending[cache_slot].append(StateRows(length, rows, 0, 1))

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
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        states: list[Tensor] = []
        for request, end, _, num_logits, _ in inputs:
            slot = request.cache_slot
            start, end = self._unread(request, end, num_logits)
            if start < end:
                tokens.extend(request.tokens[start + 1 : end + 1])
                segments.append(Segment(slot, start, end - start))
                states.append(self._pending[slot].rows(start, end))
            rows.extend(range(len(tokens) - num_logits, len(tokens)))
        return PackedInput(tokens, segments, rows, torch.cat(states) if states else None)

    def _unread(self, request: Request, end: int, num_logits: int) -> tuple[int, int]:
        """The entries that are computed for a request: the first one, and that after the last."""
        slot = request.cache_slot
        if slot in self._lost:
            return 0, 0
        end = min(self.text_end(request, end), self._pending[slot].end)
        start = min(self.cache.lengths[slot], end)
        if num_logits:
            # The newest state is kept until the commit, so that a draft can be made again.
            start = min(start, end - num_logits)
        self.cache.truncate(slot, start)
        return start, end

    def _catch_up(self, inputs: Iterable[ForwardInput]) -> None:
        """Read states without logits until each request's waiting ones fit in one pass."""
        cache = self.cache
        while cache.has_rings:
            tokens: list[int] = []
            segments: list[Segment] = []
            states: list[Tensor] = []
            for request, end, _, num_logits, _ in inputs:
                slot = request.cache_slot
                start, end = self._unread(request, end, num_logits)
                if end - start > cache.max_new_tokens:
                    end = start + cache.max_new_tokens
                    tokens.extend(request.tokens[start + 1 : end + 1])
                    segments.append(Segment(slot, start, end - start))
                    states.append(self._pending[slot].rows(start, end))
            if not segments:
                return
            self.head.read(cache, tokens, segments, [], torch.cat(states))

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

    def fit_vocabulary(self, logits: Tensor) -> Tensor:
        """The logits over the target's vocabulary."""
        return self.head.target_logits(logits, self.vocab_size)


def _compact(states: Sequence[StateRows | None]) -> list[StateRows | None]:
    """The states of a pass, copied if more than half of what the pass has computed is not kept.

    While states wait, they keep all rows of their pass in memory.
    """
    kept: dict[int, int] = {}
    for each in states:
        if each is not None:
            kept[id(each.source)] = kept.get(id(each.source), 0) + each.length
    return [
        StateRows(each.start, each.rows.clone(), 0, each.length)
        if each is not None and 2 * kept[id(each.source)] < len(each.source)
        else each
        for each in states
    ]


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
