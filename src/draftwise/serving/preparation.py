"""Compiles grammars beside the step loop, so that a slow one delays its own request alone."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import NamedTuple

from draftwise.engine.grammars import GrammarCompiler
from draftwise.serving.messages import Add


class Prepared(NamedTuple):
    """A request whose grammar is compiled.

    Attributes:
        command: that adds it.
        error: why its grammar cannot be compiled; ``None`` if it was.
    """

    command: Add
    error: BaseException | None


class GrammarThread:
    """Compiles the grammars of requests one after the other, in a thread of its own.

    llguidance releases the interpreter's lock while it compiles, so steps go on meanwhile.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        """Start it.

        Args:
            compiler: keeps what was compiled; safe to use from several threads.
        """
        self._compiler = compiler
        self._commands: queue.SimpleQueue[Add] = queue.SimpleQueue()
        self._prepared: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(self._writable, False)
        threading.Thread(target=self._run, name="draftwise-grammars", daemon=True).start()

    @property
    def readable(self) -> int:
        """A file descriptor that can be read when :meth:`take` has something."""
        return self._readable

    def needs(self, command: Add) -> bool:
        """Whether a request has a grammar that was not compiled before."""
        form = command.params.structured_outputs
        return form is not None and not self._compiler.knows(form)

    def submit(self, command: Add) -> None:
        """Compile the grammar of a request."""
        self._commands.put(command)

    def take(self) -> list[Prepared]:
        """Requests whose grammars are done."""
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
            error: BaseException | None = None
            try:
                form = command.params.structured_outputs
                assert form is not None
                self._compiler.matcher(form)
            except BaseException as raised:  # a panic of llguidance is no Exception
                error = raised
            self._prepared.put(Prepared(command, error))
            with suppress(BlockingIOError):  # the pipe is full, so it is readable
                os.write(self._writable, b".")
