"""How many requests may wait, and when somebody who is refused should ask again."""

from __future__ import annotations

import math
import time
from collections import deque

from draftwise.errors import InvalidParameterError
from draftwise.serving.errors import OverloadedError

# Requests whose ends say how fast the server is.
_REMEMBERED = 64
_LONGEST_WAIT_SECONDS = 60


class Admission:
    """Counts the requests that were let in and have not ended."""

    def __init__(self, max_running: int, max_queue: int) -> None:
        """Set the limits.

        Args:
            max_running: requests that the engine runs at once.
            max_queue: requests that may wait beside them.
        """
        self._most = max_running + max_queue
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
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
        self.num_inside += count

    def leave(self) -> None:
        """One has ended."""
        self.num_inside -= 1
        self._ends.append(time.monotonic())

    def _retry_after(self, num_missing: int) -> int:
        """Seconds until so many have ended, by how often they did lately."""
        if len(self._ends) < 2:
            return 1
        each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(1, math.ceil(num_missing * each)), _LONGEST_WAIT_SECONDS)
