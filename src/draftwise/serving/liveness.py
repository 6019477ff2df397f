"""Whether the engine still responds, judged by when it reports."""

from __future__ import annotations

import time

PING_SECONDS = 0.5
# An idle engine answers a ping at once; this leaves room for a busy machine.
_IDLE_SECONDS = 1.2
# A step may take this many times as long as the slowest one of late before it counts as stalled.
_SLOWER = 3.0
# The slowest step is forgotten at this rate per step.
_FORGETTING = 0.999


class Liveness:
    """Follows pings and reports of one engine.

    The engine answers between two steps, so a long step and a frozen process look alike at first. A
    step counts as stalled when it takes much longer than the slowest of late.

    Attributes:
        timeout: seconds without a report after which the engine counts as lost.
    """

    def __init__(self, timeout: float) -> None:
        """Start with nothing asked."""
        self.timeout = timeout
        self._asked_at: float | None = None
        self._slowest_step = 0.0

    def asked(self) -> bool:
        """Note that a ping is about to be sent; False while an earlier one is unanswered."""
        if self._asked_at is not None:
            return False
        self._asked_at = time.monotonic()
        return True

    def reported(self, step_seconds: float | None) -> None:
        """Note a report of the engine.

        Args:
            step_seconds: duration of the step that it is about; ``None`` if there was none.
        """
        self._asked_at = None
        if step_seconds is not None:
            self._slowest_step = max(step_seconds, _FORGETTING * self._slowest_step)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the oldest unanswered ping; 0 if all are answered."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def is_stalled(self, is_busy: bool) -> bool:
        """Whether the engine takes longer to answer than it should.

        Args:
            is_busy: it has requests, so a step may be running.
        """
        patience = _IDLE_SECONDS
        if is_busy:
            patience = max(patience, _SLOWER * self._slowest_step)
        return self.silent_seconds > patience

    @property
    def is_lost(self) -> bool:
        """Whether the engine has not answered for so long that another one should take over."""
        return self.silent_seconds > self.timeout
