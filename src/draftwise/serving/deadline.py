"""The time by which a request must be answered."""

from __future__ import annotations

import time

from draftwise.serving.errors import DeadlineExceededError


class Deadline:
    """A number of seconds from the arrival of a request.

    Attributes:
        arrived: monotonic time of the arrival, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        """Begin now.

        Args:
            timeout: maximum number of seconds.
        """
        self.arrived = time.monotonic()
        self._timeout = timeout

    @property
    def seconds(self) -> float:
        """Seconds since the arrival."""
        return time.monotonic() - self.arrived

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._timeout - self.seconds)

    def exceeded(self, what: str) -> DeadlineExceededError:
        """The error of a request that missed the deadline.

        Args:
            what: what was not done.
        """
        return DeadlineExceededError("request_timeout", f"{what} within {self._timeout:g} seconds")
