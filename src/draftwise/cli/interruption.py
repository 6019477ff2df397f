"""Ctrl-C as a request to stop between two steps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

EXIT_STATUS = 128 + signal.SIGINT


class Interruption:
    """Whether the user has asked to stop.

    Attributes:
        asked: they have.
    """

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """Stop at the next check, or at once if asked a second time.

        Raises:
            KeyboardInterrupt: it was asked before.
        """
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Stop here if asked to.

        Raises:
            KeyboardInterrupt: it was asked.
        """
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let ctrl-C stop the program only where it checks for it; a second one stops it at once.

    A step that is left halfway would leave requests in a state that nobody can show. Where ctrl-C
    is ignored or handled by somebody else, nothing changes.
    """
    interruption = Interruption()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield interruption
        return
    signal.signal(signal.SIGINT, lambda number, frame: interruption.ask())
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def reader_may_be_gone(interrupted: bool) -> Iterator[None]:
    """Print after ctrl-C, which in a terminal ends the program that reads the output as well.

    Raises:
        typer.Exit: the run was interrupted and the reader of the output is gone.
    """
    try:
        yield
    except (BrokenPipeError, SystemExit):  # the latter is rich's answer to the former
        if not interrupted:
            raise
        # What is still buffered has to go somewhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_STATUS) from None
