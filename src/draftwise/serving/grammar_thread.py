"""Compilation of grammars in a thread, so that a slow grammar delays only its own request."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import NamedTuple

from draftwise.engine.grammars import GrammarCompiler
from draftwise.serving.messages import Add


class Prepared(NamedTuple):
    """A request whose grammar has been compiled, or could not be compiled.

    Attributes:
        command: command that adds the request.
        error: error of the compilation; ``None`` if it succeeded.
    """

    command: Add
    error: BaseException | None


class GrammarThread:
    """Compiles the grammars of requests one after another in a thread.

    llguidance releases the GIL during compilation, so the engine can run steps meanwhile.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        """Start the thread.

        Args:
            compiler: compiler with a cache, safe to use from several threads.
        """
        self._compiler = compiler
        self._commands: queue.SimpleQueue[Add] = queue.SimpleQueue()
        self._prepared: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        # Keys of requests that were not cancelled. Single operations on a set are atomic.
        self._waiting: set[int] = set()
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        threading.Thread(target=self._run, name="draftwise-grammars", daemon=True).start()

    @property
    def readable(self) -> int:
        """A file descriptor that is readable when :meth:`take` has results."""
        return self._readable

    def needs(self, command: Add) -> bool:
        """Whether a request has a grammar that is not compiled yet."""
        grammar = command.params.structured_outputs
        return grammar is not None and not self._compiler.knows(grammar)

    def submit(self, command: Add) -> None:
        """Compile the grammar of a request."""
        self._waiting.add(command.key)
        self._commands.put(command)

    def cancel(self, key: int) -> None:
        """Do not compile the grammar of a request if its turn has not come."""
        self._waiting.discard(key)

    def take(self) -> list[Prepared]:
        """Return the requests whose grammars were compiled since the last call."""
        with suppress(BlockingIOError):
            while os.read(self._readable, 4096):
                pass
        done = []
        while not self._prepared.empty():
            done.append(self._prepared.get())
        return done

    def _run(self) -> None:
        while True:
            command = self._commands.get()
            if command.key not in self._waiting:
                continue
            self._waiting.discard(command.key)
            error: BaseException | None = None
            try:
                grammar = command.params.structured_outputs
                assert grammar is not None
                self._compiler.matcher(grammar)
            except BaseException as raised:  # a panic of llguidance is not an Exception
                error = raised
            self._prepared.put(Prepared(command, error))
            with suppress(BlockingIOError):  # the pipe is full, and thus already readable
                os.write(self._writable, b".")
