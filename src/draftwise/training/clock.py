"""Training time: wall time without the pauses of the process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

_NUM_STEPS = 16
_LONGEST_RATIO = 4.0
_SHORTEST_PAUSE = 30.0


class StepClock:
    """Adds up the times of steps.

    A process may be stopped, and a machine may sleep. A step of more than 30 seconds that took
    much longer than the ones before it counts as long as those. If steps stay slow, they soon count
    in full.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Create a clock; ``now`` returns seconds."""
        self._now = now
        self._start = now()
        self._recent: deque[float] = deque(maxlen=_NUM_STEPS)

    def start(self) -> None:
        """Begin a step."""
        self._start = self._now()

    def stop(self) -> float:
        """End a step; returns its seconds without pauses."""
        seconds = self._now() - self._start
        is_known = len(self._recent) == _NUM_STEPS
        typical = median(self._recent) if is_known else seconds
        self._recent.append(seconds)
        is_pause = seconds > max(_SHORTEST_PAUSE, _LONGEST_RATIO * typical)
        return typical if is_pause else seconds
