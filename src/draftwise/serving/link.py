"""The engine's process as the server sees it: start, feed, listen, end."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from draftwise.serving import worker
from draftwise.serving.messages import Command, Report, Stop
from draftwise.serving.settings import EngineSettings

_PATIENCE_SECONDS = 5.0


class EngineLink:
    """One process with an engine, and two threads that talk to it.

    Neither side ever waits for the other to take what it sends: a thread sends, and a thread
    receives, whatever the event loop or the engine is doing.

    Attributes:
        process: of the engine.
    """

    def __init__(
        self,
        settings: EngineSettings,
        on_report: Callable[[Report], None],
        on_end: Callable[[], None],
    ) -> None:
        """Start the process.

        Args:
            settings: of the engine.
            on_report: called in a thread of its own with everything that the process says.
            on_end: called in the same thread once the process is gone.
        """
        # A process that is forked from one with threads can hang in any library.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._connection: Connection = ours
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._on_report, self._on_end = on_report, on_end
        self.process: BaseProcess = context.Process(
            target=worker.run, args=(theirs, settings), name="draftwise-engine", daemon=True
        )
        self.process.start()
        theirs.close()
        self._threads = [
            threading.Thread(target=each, name=f"draftwise-{name}", daemon=True)
            for name, each in (("send", self._send), ("receive", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, command: Command) -> None:
        """Hand a command over; it is followed between two steps."""
        self._commands.put(command)

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        self.send(Stop())
        self.process.join(_PATIENCE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._commands.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._connection.close()

    def _send(self) -> None:
        # An error here is the other side's end, which the receiving thread reports.
        with contextlib.suppress(OSError):
            while (command := self._commands.get()) is not None:
                self._connection.send(command)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._on_report(self._connection.recv())
        self._on_end()
