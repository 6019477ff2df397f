"""The replica processes, and how batches are divided among them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from draftwise.engine.batch import Batch
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.parallel.replicas.messages import (
    Channel,
    ChannelClosedError,
    ReplicaSpec,
    TextChange,
)
from draftwise.errors import DraftwiseError, ReplicaError

Result = TypeVar("Result")

_END_SECONDS = 10.0
_MODULE = "draftwise.engine.parallel.replicas.replica"


class Replicas:
    """Replicas in separate processes. The first replica has rank 1; the engine has rank 0.

    Attributes:
        count: number of ranks, including the engine's.
    """

    def __init__(self, specs: Sequence[ReplicaSpec], fingerprints: Sequence[str]) -> None:
        """Start one process for each specification.

        Args:
            specs: configuration of each replica.
            fingerprints: fingerprints of the models that the engine itself has loaded.

        Raises:
            DraftwiseError: a replica cannot load a model, or loads a different one.
        """
        self.count = len(specs) + 1
        self._channels: list[Channel] = []
        processes: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, _end, self._channels, processes)
        for _ in specs:
            engine_end, replica_end = socket.socketpair()
            with replica_end:
                processes.append(_start(replica_end))
            self._channels.append(Channel(engine_end))
        for rank, spec in enumerate(specs, 1):
            self.send(spec, rank)
        for rank in range(1, self.count):
            answer = self.receive(rank)
            if isinstance(answer, DraftwiseError):
                self.close()
                raise answer
            if answer != list(fingerprints):
                self.close()
                raise ReplicaError("draft_replicas", f"replica {rank} loaded other models")

    def send(self, message: object, rank: int) -> None:
        """Send a message to a replica.

        Raises:
            ReplicaError: its process has ended.
        """
        try:
            self._channels[rank - 1].send(message)
        except ChannelClosedError as error:
            raise _gone(rank, error) from error

    def receive(self, rank: int) -> Any:
        """Wait for a replica's answer.

        Raises:
            ReplicaError: its process has ended.
        """
        try:
            return self._channels[rank - 1].receive()
        except ChannelClosedError as error:
            raise _gone(rank, error) from error


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
        """Set up."""
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
            number, known = self._known.get(slot, (-1, 0))
            is_new = number != request.request_id
            changes.append(
                TextChange(
                    slot,
                    is_new,
                    request.tokens[0 if is_new else known :],  # a text only grows
                    self.draft.cache.lengths[slot],
                    0 if self.companion is None else self.companion.cache.lengths[slot],
                )
            )
            self._known[slot] = request.request_id, len(request.tokens)
        return changes

    def exchange(
        self, messages: Mapping[int, object], model: CachedModel, own: Callable[[], Result]
    ) -> dict[int, Result]:
        """Send messages, compute the engine's own share meanwhile, and wait for the answers.

        Args:
            messages: by rank, for the replicas that have work.
            model: the engine's own model. Its cache takes over the lengths of the replicas' caches.
            own: computes the engine's own share.

        Returns:
            The results by rank, with the engine's own at rank 0.

        Raises:
            ReplicaError: a process has ended.
        """
        for rank, message in messages.items():
            self.replicas.send(message, rank)
        results = {0: own()}
        for rank in messages:
            answer = self.replicas.receive(rank)
            for slot, length in answer.cached.items():
                model.cache.lengths[slot] = length
            results[rank] = answer.result
        return results


def _start(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process that inherits one end of a socket pair and no other descriptors."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    descriptor = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(descriptor)],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
    )


def _gone(rank: int, error: Exception) -> ReplicaError:
    return ReplicaError("draft_replicas", f"replica {rank} does not answer: {error}")


def _end(channels: list[Channel], processes: list[subprocess.Popen[bytes]]) -> None:
    """Close the connections, which ends the replicas. Kill those that do not end."""
    for channel in channels:
        channel.close()
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
