"""Whose whole draft is verified from time to time, so that estimates stay up to date."""

from __future__ import annotations

from collections.abc import Sequence

# The interval between explorations is at most this many times the first.
_LONGEST_INTERVAL = 8


class Exploration:
    """Lets requests explore in turn, at intervals that double while nothing else is drafted.

    Attributes:
        others_drafted: whether a request that did not explore drafted since the last exploration.
    """

    def __init__(self, every: int) -> None:
        """Set up.

        Args:
            every: number of steps of the first interval.
        """
        self._every = self._interval = self._next_step = every
        self._count = 0
        self.others_drafted = False

    def explorer(self, step: int, drafting: Sequence[int]) -> int | None:
        """The request that explores in a step; ``None`` for none. Call it once per step.

        Args:
            step: number of the step.
            drafting: the requests that can draft, at least one.
        """
        if step < self._next_step:
            return None
        self._count += 1
        longer = min(2 * self._interval, _LONGEST_INTERVAL * self._every)
        self._interval = self._every if self.others_drafted else longer
        self._next_step = step + self._interval
        self.others_drafted = False
        return drafting[self._count % len(drafting)]
