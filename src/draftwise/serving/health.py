"""Health of the server, and liveness of the engine by the times of its reports."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

PING_SECONDS = 0.5
# An idle engine responds to a ping immediately; this allows for a busy machine.
_IDLE_SECONDS = 1.2
# A step counts as stalled when it takes this many times as long as the slowest recent step.
_STALL_FACTOR = 3.0
# Decay of the duration of the slowest step, per step.
_DECAY = 0.999


class HealthStatus(StrEnum):
    """State of the server.

    ``OK``: the server responds. ``STARTING``: the engine is being loaded, and requests wait for it.
    ``STALLED``: a component does not respond; the engine is restarted after the step timeout.
    ``STOPPING``: the server is shutting down and accepts no new requests.
    """

    OK = "ok"
    STARTING = "starting"
    STALLED = "stalled"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Health:
    """Contents of `/health`.

    Attributes:
        status: state of the server.
        reason: why the state is not ``OK``; ``None`` if it is.
    """

    status: HealthStatus
    reason: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the server responds."""
        return self.status is HealthStatus.OK


class Liveness:
    """Tracks pings and reports of one engine.

    The engine responds between steps, so a long step and a frozen process cannot be distinguished
    at first. A step counts as stalled when it takes much longer than the slowest recent step.

    Attributes:
        timeout: seconds without a report after which the engine counts as lost.
    """

    def __init__(self, timeout: float) -> None:
        """Start without an unanswered ping."""
        self.timeout = timeout
        self._asked_at: float | None = None
        self._slowest_step = 0.0

    def asked(self) -> bool:
        """Record a ping that is about to be sent; False if an earlier ping is unanswered."""
        if self._asked_at is not None:
            return False
        self._asked_at = time.monotonic()
        return True

    def reported(self, step_seconds: float | None) -> None:
        """Record a report of the engine.

        Args:
            step_seconds: duration of the reported step; ``None`` if there was none.
        """
        self._asked_at = None
        if step_seconds is not None:
            self._slowest_step = max(step_seconds, _DECAY * self._slowest_step)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the oldest unanswered ping; 0 if all are answered."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def is_stalled(self, is_busy: bool) -> bool:
        """Whether the engine takes longer to respond than expected.

        Args:
            is_busy: whether the engine has requests, so that a step may be running.
        """
        limit = _IDLE_SECONDS
        if is_busy:
            limit = max(limit, _STALL_FACTOR * self._slowest_step)
        return self.silent_seconds > limit

    @property
    def is_lost(self) -> bool:
        """Whether the engine has not responded within the timeout and should be restarted."""
        return self.silent_seconds > self.timeout
