"""Assigns requests to replicas, and tracks what each replica knows of their texts."""

from __future__ import annotations

from draftwise.engine.batch import Batch
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.parallel.replicas.messages import TextChange
from draftwise.engine.parallel.replicas.processes import Replicas


class Shares:
    """Divides batches by cache slot.

    Cache slot ``i`` belongs to rank ``i`` modulo the number of ranks, so that cache entries never
    move. The engine's own caches keep the lengths of all slots.

    Attributes:
        replicas: the replica processes.
        draft: the engine's own draft model.
        companion: the engine's own companion; ``None`` without a companion.
    """

    def __init__(
        self, replicas: Replicas, draft: CachedModel, companion: CachedModel | None
    ) -> None:
        """Set up.

        Args:
            replicas: the replica processes.
            draft: the engine's own draft model.
            companion: the engine's own companion; ``None`` without a companion.
        """
        self.replicas = replicas
        self.draft, self.companion = draft, companion
        self._known: dict[int, tuple[int, int]] = {}
        self._last: tuple[Batch, list[tuple[list[int], Batch]]] | None = None

    def of(self, batch: Batch) -> list[tuple[list[int], Batch]]:
        """For each rank, the indices of its requests in the batch and its part of the batch."""
        if self._last is None or self._last[0] is not batch:
            count = self.replicas.count
            shares = []
            for rank in range(count):
                own = [
                    index
                    for index, request in enumerate(batch.generating)
                    if request.cache_slot % count == rank
                ]
                chunks = [each for each in batch.chunks if each.request.cache_slot % count == rank]
                shares.append((own, batch.part(own, chunks)))
            self._last = batch, shares
        return self._last[1]

    def changes(self, part: Batch) -> list[TextChange]:
        """The text changes that a replica needs for its part of the batch."""
        requests = {r.cache_slot: r for r in part.generating}
        requests |= {chunk.request.cache_slot: chunk.request for chunk in part.chunks}
        changes = []
        for slot, request in requests.items():
            number, kept = self._known.get(slot, (-1, 0))
            is_new = number != request.request_id
            kept = 0 if is_new else kept  # a text only grows
            changes.append(
                TextChange(
                    slot,
                    is_new,
                    kept,
                    request.tokens[kept:],
                    self.draft.cache.lengths[slot],
                    0 if self.companion is None else self.companion.cache.lengths[slot],
                )
            )
            self._known[slot] = request.request_id, len(request.tokens)
        return changes
