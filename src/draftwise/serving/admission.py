"""Admission control: a limit on waiting requests, and retry times for rejected requests."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable

from draftwise.errors import InvalidParameterError
from draftwise.serving.errors import OverloadedError

# The throughput of the server is estimated from the ends of its latest requests: at most this many
# requests, not older than this many seconds, and only since it was last idle.
_MAX_ENDS, _MAX_AGE_SECONDS = 64, 10.0
_SHORTEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.01, 60.0


class Admission:
    """Counts the admitted requests that have not ended.

    Each rejected request gets a retry time at which a place is expected to be free that was not
    promised to another rejected request. If all clients retried at the same time, handling their
    requests would cost as much as the admitted requests.
    """

    def __init__(
        self, max_running: int, max_queue: int, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        """Set the limits.

        Args:
            max_running: maximum number of running requests.
            max_queue: maximum number of waiting requests.
            on_refused: called when requests are refused because the queue is full.
        """
        self._limit = max_running + max_queue
        self._on_refused = on_refused
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._expected: list[float] = []  # heap of the retry times of rejected requests
        self.num_inside = 0

    def check(self, count: int) -> None:
        """Check whether requests would be admitted.

        Raises:
            InvalidParameterError: the number of requests exceeds the limit.
            OverloadedError: the queue is full.
        """
        if count > self._limit:
            raise InvalidParameterError(
                "n", f"{count} answers exceed the limit of {self._limit} waiting or running answers"
            )
        if self.num_inside + count > self._limit:
            self._on_refused()
            raise OverloadedError(
                "server",
                f"{self.num_inside} requests are waiting or running; try again later",
                self._retry_after(self.num_inside + count - self._limit),
            )

    def enter(self, count: int) -> None:
        """Admit requests, either all of them or none.

        Raises:
            DraftwiseError: they are not admitted; see :meth:`check`.
        """
        self.check(count)
        if not self.num_inside:
            self._ends.clear()
        self.num_inside += count

    def leave(self) -> None:
        """Record that a request has ended."""
        self.num_inside -= 1
        self._ends.append(time.monotonic())

    def _retry_after(self, num_missing: int) -> float:
        """Estimate the seconds until ``num_missing`` more places are free than were promised."""
        now = time.monotonic()
        while self._expected and self._expected[0] <= now:
            heapq.heappop(self._expected)
        while len(self._ends) > 2 and self._ends[0] < now - _MAX_AGE_SECONDS:
            self._ends.popleft()
        seconds = 1.0
        if len(self._ends) > 1:
            interval = (now - self._ends[0]) / (len(self._ends) - 1)
            seconds = max(_SHORTEST_WAIT_SECONDS, (len(self._expected) + num_missing) * interval)
        seconds = min(seconds, _LONGEST_WAIT_SECONDS)
        for _ in range(num_missing):
            heapq.heappush(self._expected, now + seconds)
        return seconds
