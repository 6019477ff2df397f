"""Where the time of a step goes."""

from __future__ import annotations

import time

from draftwise.core.types import StepTimes


class Stopwatch:
    """Splits one step's wall time into named parts."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Count the time since the last lap to a part."""
        now = time.perf_counter()
        self._seconds[part] = now - self._last
        self._last = now

    def start_again(self) -> None:
        """Leave out the time since the last lap."""
        self._last = time.perf_counter()

    def since_last_lap(self) -> float:
        """Seconds since the last lap."""
        return time.perf_counter() - self._last

    def times(self, rest_before: float, num_prompt_tokens: int) -> StepTimes:
        """The parts, with what the step before took after its own last lap.

        Args:
            rest_before: seconds.
            num_prompt_tokens: that the step processed.
        """
        seconds = self._seconds
        return StepTimes(
            seconds["draft"],
            seconds["companion"],
            seconds["select"],
            seconds["verify"],
            seconds["accept"],
            seconds["rest"] + rest_before,
            num_prompt_tokens,
        )
