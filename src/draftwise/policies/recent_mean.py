"""A mean over recent values."""

from __future__ import annotations

# Durations are clipped to this factor of their mean. A pause of the machine says nothing.
_MOST_UNUSUAL = 3.0


class RecentMean:
    """The mean of all values at first, and of recent ones later.

    Attributes:
        value: the mean.
        count: number of values so far.
    """

    def __init__(self, memory: int, value: float = 0.0) -> None:
        """Start without any value.

        Args:
            memory: once there are so many values, a new one has the weight 1 / ``memory``.
            value: the mean before any value.
        """
        self.value, self.count = value, 0
        self._memory = memory

    def as_prior(self, num_values: int) -> RecentMean:
        """Another mean that begins with this one, as the mean of at most so many values."""
        other = RecentMean(self._memory, self.value)
        other.count = min(self.count, num_values)
        return other

    def observe(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, self._memory)

    def observe_duration(self, duration: float) -> None:
        """Add a duration, clipped to what is usual."""
        usual = _MOST_UNUSUAL * self.value
        self.observe(min(duration, usual) if self.count else duration)
