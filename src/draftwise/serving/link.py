"""The server's link to the engine's process: start, send, receive, stop."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from draftwise.errors import InvalidParameterError
from draftwise.serving import worker
from draftwise.serving.messages import Command, Report, Stop
from draftwise.serving.settings import EngineSettings

_LOG = logging.getLogger("draftwise.serving")
_STOP_SECONDS = 5.0


def serialize(command: Command) -> bytes:
    """Serialise a command for the engine's process.

    This is called where the command is created, so that a failure affects no other command.

    Raises:
        InvalidParameterError: the command cannot be serialised.
    """
    try:
        return pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise InvalidParameterError(
            "body", f"cannot be sent to the engine: {type(error).__name__}: {error}"
        ) from error


class EngineLink:
    """A process with an engine, and two threads that communicate with it.

    One thread sends commands and the other receives reports, so that neither the event loop nor the
    engine blocks while the other is busy. If a thread ends for any reason, the process is killed
    and the engine counts as lost.

    Attributes:
        process: the engine's process.
    """

    def __init__(
        self,
        settings: EngineSettings,
        on_report: Callable[[Report], None],
        on_end: Callable[[], None],
    ) -> None:
        """Start the process.

        Args:
            settings: settings of the engine.
            on_report: called with each report of the process, in the receiving thread.
            on_end: called once when the engine is lost, in one of the two threads. Not called
                after :meth:`close`.
        """
        # Forking a process that has threads can cause deadlocks.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._connection: Connection = ours
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._on_report, self._on_end = on_report, on_end
        self._ending = threading.Lock()
        self._ended = False
        self.process: BaseProcess = context.Process(
            target=worker.run, args=(theirs, settings), name="draftwise-engine", daemon=True
        )
        self.process.start()
        theirs.close()
        self._threads = [
            threading.Thread(
                target=self._guard, args=(each,), name=f"draftwise-{name}", daemon=True
            )
            for name, each in (("send", self._send), ("receive", self._receive))
        ]

    def start(self) -> None:
        """Begin to send commands and to receive reports."""
        for thread in self._threads:
            thread.start()

    def send(self, command: bytes) -> None:
        """Queue a command serialised by :func:`serialize`; the engine executes it between steps."""
        self._outbox.put(command)

    def lose(self, reason: str) -> None:
        """Kill the process and report the engine as lost, unless it was already lost or closed."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
        _LOG.error("the engine is lost", extra={"reason": reason, "pid": self.process.pid})
        self._kill()
        self._on_end()

    def close(self) -> None:
        """Stop the process; kill it if it does not exit by itself."""
        with self._ending:
            was_lost, self._ended = self._ended, True
        if was_lost:
            self._kill()
        else:
            self.send(serialize(Stop()))
            self.process.join(_STOP_SECONDS)
            if self.process.is_alive():
                self._kill()
        self.process.join()
        self._outbox.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    def _kill(self) -> None:
        with contextlib.suppress(ValueError):  # the process object is closed
            self.process.kill()

    def _guard(self, work: Callable[[], str]) -> None:
        """Run one of the two threads; when it ends, the engine is lost."""
        try:
            reason = work()
        except (EOFError, OSError) as error:
            reason = f"its connection was closed: {error!r}"
        except BaseException as error:
            _LOG.exception("a thread of the engine's link failed")
            reason = f"a thread of its link failed: {error!r}"
        self.lose(reason)

    def _send(self) -> str:
        while (command := self._outbox.get()) is not None:
            self._connection.send_bytes(command)
        return "its link was closed"

    def _receive(self) -> str:
        while True:
            self._on_report(self._connection.recv())
