"""Starts the processes of replicas, and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from draftwise.engine.replicas.link import Group, meeting_place
from draftwise.engine.replicas.process import ReplicaSpec
from draftwise.errors import DraftwiseError, ReplicaError

_END_SECONDS = 10.0


class Replicas:
    """Replicas in processes of their own, the first of them number 1; number 0 is the engine.

    Attributes:
        count: of processes, that of the engine included.
    """

    def __init__(self, specs: Sequence[ReplicaSpec], fingerprints: Sequence[str]) -> None:
        """Start one for each.

        Args:
            specs: what each is made of.
            fingerprints: of the models that the engine itself has loaded.

        Raises:
            DraftwiseError: a model cannot be loaded there, or is another one there.
        """
        self.count = len(specs) + 1
        store = meeting_place(0, self.count)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        module = "draftwise.engine.replicas.process"
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(store.port), str(rank), str(self.count)],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
            for rank in range(1, self.count)
        ]
        self._store = store
        self._group = Group(store, 0, self.count)
        self.close = weakref.finalize(self, _end, self._group, processes)
        for rank, spec in enumerate(specs, 1):
            self.send(spec, rank)
        for rank in range(1, self.count):
            answer = self.receive(rank)
            if isinstance(answer, DraftwiseError):
                self.close()
                raise answer
            if list(answer) != list(fingerprints):
                self.close()
                raise ReplicaError("draft_replicas", f"replica {rank} loaded other models")

    def send(self, value: object, rank: int) -> None:
        """Ask a replica for something.

        Raises:
            ReplicaError: it is gone.
        """
        try:
            self._group.send(value, rank)
        except RuntimeError as error:
            raise _gone(rank, error) from error

    def receive(self, rank: int) -> Any:
        """Its answer.

        Raises:
            ReplicaError: it is gone.
        """
        try:
            return self._group.receive(rank)
        except RuntimeError as error:
            raise _gone(rank, error) from error


def _gone(rank: int, error: RuntimeError) -> ReplicaError:
    return ReplicaError("draft_replicas", f"replica {rank} does not answer: {error}")


def _end(group: Group, processes: list[subprocess.Popen[bytes]]) -> None:
    """Say that there is nothing more to do; end who does not listen."""
    for rank, process in enumerate(processes, 1):
        try:
            if process.poll() is None:
                group.send(None, rank)
                process.wait(_END_SECONDS)
        except (RuntimeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
