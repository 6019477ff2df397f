"""How many requests may wait, and when somebody who is refused should ask again."""

from __future__ import annotations

import heapq
import time
from collections import deque

from draftwise.errors import InvalidParameterError
from draftwise.serving.errors import OverloadedError

# Requests whose ends say how fast the server is, as long as it is not idle: the latest ones, and
# none that ended longer ago.
_REMEMBERED, _REMEMBERED_SECONDS = 64, 10.0
_SHORTEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.01, 60.0


class Admission:
    """Counts the requests that were let in and have not ended.

    Whoever is refused is told to come back when a place will be free that nobody else was told of:
    a crowd that came back at once would cost the server as much as what it lets in.
    """

    def __init__(self, max_running: int, max_queue: int) -> None:
        """Set the limits.

        Args:
            max_running: requests that the engine runs at once.
            max_queue: requests that may wait beside them.
        """
        self._most = max_running + max_queue
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        self._expected: list[float] = []  # when those who were refused will be back, a heap
        self.num_inside = 0

    def enter(self, count: int) -> None:
        """Let some requests in, all or none.

        Raises:
            InvalidParameterError: there never is room for so many at once.
            OverloadedError: there is no room now.
        """
        if count > self._most:
            raise InvalidParameterError(
                "n", f"{count} answers at once are more than the {self._most} that may wait or run"
            )
        if self.num_inside + count > self._most:
            raise OverloadedError(
                "server",
                f"{self.num_inside} requests wait or run already; ask again later",
                self._retry_after(self.num_inside + count - self._most),
            )
        if not self.num_inside:
            self._ends.clear()
        self.num_inside += count

    def leave(self) -> None:
        """One has ended."""
        self.num_inside -= 1
        self._ends.append(time.monotonic())

    def _retry_after(self, num_missing: int) -> float:
        """Seconds until so many have ended that nobody waits for, by how often they did lately."""
        now = time.monotonic()
        while self._expected and self._expected[0] <= now:
            heapq.heappop(self._expected)
        while len(self._ends) > 2 and self._ends[0] < now - _REMEMBERED_SECONDS:
            self._ends.popleft()
        seconds = 1.0
        if len(self._ends) > 1:
            each = (now - self._ends[0]) / (len(self._ends) - 1)
            seconds = max(_SHORTEST_WAIT_SECONDS, (len(self._expected) + num_missing) * each)
        seconds = min(seconds, _LONGEST_WAIT_SECONDS)
        for _ in range(num_missing):
            heapq.heappush(self._expected, now + seconds)
        return seconds
