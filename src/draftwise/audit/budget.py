"""Limits of an audit: answers and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class SpentError(Exception):
    """The limit of answers or of time was reached. It never leaves an audit."""


class Budget:
    """Counts answers and time, and reports progress.

    Attributes:
        num_answers: maximum number of answers.
        num_asked: answers that were asked for.
    """

    def __init__(
        self,
        num_answers: int,
        seconds: float,
        on_progress: Callable[[str, int], None] = lambda what, num_asked: None,
    ) -> None:
        """Start the clock.

        Args:
            num_answers: maximum number of answers.
            seconds: maximum duration.
            on_progress: called with what is being checked and the number of answers so far.
        """
        self.num_answers, self.num_asked = num_answers, 0
        self._start, self._seconds = time.monotonic(), seconds
        self._on_progress, self._what = on_progress, ""
        self._lock = threading.Lock()

    @property
    def num_left(self) -> int:
        """Answers that may still be asked for; 0 after the time is over."""
        return 0 if self.seconds >= self._seconds else self.num_answers - self.num_asked

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._start

    def begin(self, what: str) -> None:
        """Name what is checked from now on."""
        self._what = what
        self._on_progress(what, self.num_asked)

    def spend(self, num_answers: int) -> None:
        """Count answers before they are asked for.

        Raises:
            SpentError: they are too many, or the time is over.
        """
        with self._lock:
            if self.num_left < num_answers:
                raise SpentError
            self.num_asked += num_answers
            self._on_progress(self._what, self.num_asked)
