"""Recent statistics of the engine for the web page: means over about a second."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from draftwise.serving.messages import EngineLoad, EngineOutputs, StepStats

_WINDOW_SECONDS = 1.5
# Acceptance by position and the prefix cache need more requests than those of one second.
_LONG_WINDOW_SECONDS = 30.0


class _TimedStep(NamedTuple):
    time: float
    step: StepStats


class Statistics:
    """Keeps the steps of the last seconds and summarises them."""

    def __init__(self) -> None:
        """Start without steps."""
        self._started = time.monotonic()
        self._steps: deque[_TimedStep] = deque()
        self._load: EngineLoad | None = None

    def observe(self, outputs: EngineOutputs) -> None:
        """Record outputs of the engine."""
        if outputs.load is not None:
            self._load = outputs.load
        now = time.monotonic()
        if outputs.step is not None:
            self._steps.append(_TimedStep(now, outputs.step))
        while self._steps and self._steps[0].time < now - _LONG_WINDOW_SECONDS:
            self._steps.popleft()

    def snapshot(self) -> dict[str, Any]:
        """The current statistics as a JSON-serialisable object; unknown values are ``None``."""
        now = time.monotonic()
        recent = [each.step for each in self._steps if each.time >= now - _LONG_WINDOW_SECONDS]
        last = [each.step for each in self._steps if each.time >= now - _WINDOW_SECONDS]
        load = self._load
        num_requests = sum(step.num_requests for step in last)
        num_tokens = sum(step.num_tokens for step in last)
        seconds: dict[str, float] = {}
        for step in last:
            for part, each in step.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + each
        whole = sum(seconds.values())
        looked_up = sum(step.num_prefix_queries for step in recent)
        found = sum(step.num_prefix_hits for step in recent)
        verified, accepted = _sums(recent, "verified"), _sums(recent, "accepted")
        return {
            "time": time.time(),
            "uptime_seconds": now - self._started,
            "num_running": 0 if load is None else load.num_running,
            "num_waiting": 0 if load is None else load.num_waiting,
            "cache_usage": 0.0 if load is None else load.cache_usage,
            "lenience": None if load is None else load.lenience,
            "guard_balance": None if load is None else load.guard_balance,
            "prefix_cache_hit_rate": found / looked_up if looked_up else None,
            "goodput": num_tokens / min(_WINDOW_SECONDS, now - self._started),
            "step_seconds": whole / len(last) if last else None,
            "mean_accepted_length": num_tokens / num_requests if num_requests else None,
            "acceptance_rate": sum(accepted) / sum(verified) if sum(verified) else None,
            "acceptance_by_position": [
                kept / total for kept, total in zip(accepted, verified, strict=True) if total
            ],
            "time_split": {part: each / len(last) for part, each in seconds.items()},
        }


def _sums(steps: list[StepStats], name: str) -> list[int]:
    """Counts by position, summed over steps."""
    width = max((len(step.verified) for step in steps), default=0)
    total = [0] * width
    for step in steps:
        for position, count in enumerate(getattr(step, name)):
            total[position] += count
    return total
