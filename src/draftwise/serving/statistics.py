"""What the engine did lately, as a page shows it: means over the last second or so."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from draftwise.serving.messages import Load, StepFigures, Turn

_WINDOW_SECONDS = 1.5
# Acceptance by position needs more drafts than a second brings.
_LONG_WINDOW_SECONDS = 30.0


class _Seen(NamedTuple):
    time: float
    step: StepFigures


class Statistics:
    """Keeps the last steps."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._started = time.monotonic()
        self._steps: deque[_Seen] = deque()
        self._load: Load | None = None

    def observe(self, turn: Turn) -> None:
        """Keep what a turn of the engine brought."""
        if turn.load is not None:
            self._load = turn.load
        now = time.monotonic()
        if turn.step is not None:
            self._steps.append(_Seen(now, turn.step))
        while self._steps and self._steps[0].time < now - _LONG_WINDOW_SECONDS:
            self._steps.popleft()

    def snapshot(self) -> dict[str, Any]:
        """The present state, ready for JSON; what cannot be said now is ``None``."""
        now = time.monotonic()
        later = [seen.step for seen in self._steps if seen.time >= now - _LONG_WINDOW_SECONDS]
        last = [seen.step for seen in self._steps if seen.time >= now - _WINDOW_SECONDS]
        load = self._load
        num_requests = sum(step.num_requests for step in last)
        num_tokens = sum(step.num_tokens for step in last)
        seconds: dict[str, float] = {}
        for step in last:
            for part, each in step.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + each
        whole = sum(seconds.values())
        verified, accepted = _added(later, "verified"), _added(later, "accepted")
        return {
            "time": time.time(),
            "uptime_seconds": now - self._started,
            "num_running": 0 if load is None else load.num_running,
            "num_waiting": 0 if load is None else load.num_waiting,
            "cache_usage": 0.0 if load is None else load.cache_usage,
            "lenience": None if load is None else load.lenience,
            "calibration_error": None if load is None else load.calibration_error,
            "goodput": num_tokens / min(_WINDOW_SECONDS, now - self._started),
            "step_seconds": whole / len(last) if last else None,
            "mean_accepted_length": num_tokens / num_requests if num_requests else None,
            "acceptance_rate": sum(accepted) / sum(verified) if sum(verified) else None,
            "acceptance_by_position": [
                ours / all_ for ours, all_ in zip(accepted, verified, strict=True) if all_
            ],
            "time_split": {part: each / len(last) for part, each in seconds.items()},
        }


def _added(steps: list[StepFigures], name: str) -> list[int]:
    """Counts by position over all steps."""
    width = max((len(step.verified) for step in steps), default=0)
    total = [0] * width
    for step in steps:
        for position, count in enumerate(getattr(step, name)):
            total[position] += count
    return total
