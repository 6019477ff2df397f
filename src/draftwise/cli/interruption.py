"""Graceful handling of ctrl-C: a run stops between two steps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

EXIT_STATUS = 128 + signal.SIGINT


class Interruption:
    """The state of an interruption by the user.

    Attributes:
        asked: whether the user has pressed ctrl-C.
    """

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """Request a stop at the next check; a second request stops immediately.

        Raises:
            KeyboardInterrupt: a stop was already requested.
        """
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Stop here if a stop was requested.

        Raises:
            KeyboardInterrupt: a stop was requested.
        """
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Defer ctrl-C to the next :meth:`Interruption.check`; a second ctrl-C stops immediately.

    An interrupted step would leave requests in an inconsistent state. If SIGINT is ignored or has
    another handler, it is left unchanged.
    """
    interruption = Interruption()
    previous_handler = signal.getsignal(signal.SIGINT)
    if previous_handler is not signal.default_int_handler:
        yield interruption
        return
    signal.signal(signal.SIGINT, lambda number, frame: interruption.ask())
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@contextmanager
def reader_may_be_gone(interrupted: bool) -> Iterator[None]:
    """Context for printing after ctrl-C, which may also have ended the reader of the output.

    Raises:
        typer.Exit: the run was interrupted and the pipe of the output is closed.
    """
    try:
        yield
    except (BrokenPipeError, SystemExit):  # rich converts the former to the latter
        if not interrupted:
            raise
        # Python flushes the buffer of stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_STATUS) from None
