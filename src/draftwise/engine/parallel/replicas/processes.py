"""Starts and ends the replica processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from draftwise.engine.parallel.replicas.channel import Channel, ChannelClosedError
from draftwise.engine.parallel.replicas.messages import ReplicaSpec
from draftwise.errors import DraftwiseError, ReplicaError

_END_SECONDS = 10.0
_MODULE = "draftwise.engine.parallel.replicas.process"


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
            if answer.fingerprints != list(fingerprints):
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
