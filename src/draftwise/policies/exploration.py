"""Whose whole draft is verified from time to time, so that estimates stay up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.policies.nearest import batch_bucket

# The interval between explorations is at most this many times the first.
_LONGEST_INTERVAL = 8


class Exploration:
    """Lets requests explore in turn, at intervals that double while nothing else is drafted.

    Each batch size has its own interval. In a batch that ends, the last requests draft, which says
    nothing about the full batch.
    """

    def __init__(self, every: int) -> None:
        """Set up.

        Args:
            every: number of steps of the first interval.
        """
        self._every = every
        self._count = 0
        self._records: dict[int, _Record] = {}
        self._current = _Record(every)

    def explorer(self, num_requests: int, drafting: Sequence[int]) -> int | None:
        """The request that explores in a step; ``None`` for none. Call it once per step.

        Args:
            num_requests: number of requests that gain tokens in the step, at least 1.
            drafting: the requests that can draft, at least one.
        """
        bucket = batch_bucket(num_requests)
        record = self._current = self._records.setdefault(bucket, _Record(self._every))
        record.num_steps += 1
        if record.num_steps < record.interval:
            return None
        self._count += 1
        longer = min(2 * record.interval, _LONGEST_INTERVAL * self._every)
        record.interval = self._every if record.others_drafted else longer
        record.num_steps, record.others_drafted = 0, False
        return drafting[self._count % len(drafting)]

    def others_drafted(self) -> None:
        """Record that a request that does not explore drafted in the step that was asked about."""
        self._current.others_drafted = True


@dataclass
class _Record:
    """Steps at similar batch sizes.

    Attributes:
        interval: number of steps from one exploration to the next.
        num_steps: number of steps since the last exploration.
        others_drafted: whether a request that did not explore drafted in one of them.
    """

    interval: int
    num_steps: int = 0
    others_drafted: bool = False
