"""A drafting head's key-value cache, and the target's states that the head has not read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftwise.engine.cached_model import CachedModel, ForwardInput
from draftwise.engine.lifecycle import Commit, StateRows
from draftwise.engine.request import Request
from draftwise.models.heads.draft_head import DraftHead
from draftwise.models.kv_cache import KVCache
from draftwise.models.segment import Segment

# A request that does not draft is read when this many of its states wait.
_MAX_PENDING = 256


class PendingStates:
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


class CachedDraftHead(CachedModel):
    """Keeps a head's cache and the target's states consistent with the requests.

    A step's commit brings the states of the tokens that the target has read and kept. The head
    reads them before it drafts for the request again. Its cache has one entry for each state that
    it has read.

    Attributes:
        head: the head.
    """

    def __init__(self, model: DraftHead, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the head.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
        """
        super().__init__(model, cache, vocab_size)
        self.head = model
        self.state_layers = model.state_layers
        self._pending = [PendingStates() for _ in range(self.num_rows)]
        # Requests of which states were lost when a step was interrupted.
        self._lost: set[int] = set()

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

    def fit_vocabulary(self, logits: Tensor) -> Tensor:
        """The logits over the target's vocabulary."""
        return self.head.target_logits(logits, self.vocab_size)

    def _unread(self, request: Request, end: int, num_again: int) -> tuple[int, int]:
        """The entries that are computed for a request: the first one, and that after the last.

        Args:
            request: the request.
            end: number of its tokens up to which the head reads.
            num_again: number of entries at the end that are computed even if they are known.
        """
        slot = request.cache_slot
        if slot in self._lost:
            return 0, 0
        end = min(self.text_end(request, end), self._pending[slot].end)
        # States are kept until the commit, so that a draft can be made again.
        start = min(self.cache.lengths[slot], end - num_again)
        self.cache.truncate(slot, start)
        return start, end

    def _states_of(self, segments: Sequence[Segment]) -> Tensor:
        """``[entries, size]`` the waiting states that entries are computed from."""
        rows = [self._pending[slot].rows(start, start + n) for slot, start, n in segments]
        return torch.cat(rows)

    def _catch_up(self, inputs: Iterable[ForwardInput], most: int | None = None) -> None:
        """Read states without logits until each request's waiting ones fit in one pass.

        Args:
            inputs: what the pass reads.
            most: number of a request's states that fit; ``None`` for as many as the cache allows.
        """
        cache = self.cache
        most = cache.max_new_tokens if most is None else most
        while cache.has_rings:
            requests: list[Request] = []
            segments: list[Segment] = []
            for request, end, _, num_logits, _ in inputs:
                start, end = self._unread(request, end, num_logits)
                if end - start > most:
                    requests.append(request)
                    segments.append(Segment(request.cache_slot, start, most))
            if not segments:
                return
            self._read_context(requests, segments)

    def _read_context(self, requests: Sequence[Request], segments: Sequence[Segment]) -> None:
        """Read waiting states in one pass without logits.

        Args:
            requests: the requests, in order of cache slot.
            segments: ``[requests]`` the entries that are computed.
        """
        raise NotImplementedError


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
