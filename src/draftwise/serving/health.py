"""Whether the server answers requests, in a word and a reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HealthStatus(StrEnum):
    """What the server can do now.

    ``OK``: it answers. ``STARTING``: the engine is being loaded, and requests wait for it.
    ``STALLED``: a part of the server does not respond; if that lasts, it is replaced. ``STOPPING``:
    nothing new is taken.
    """

    OK = "ok"
    STARTING = "starting"
    STALLED = "stalled"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Health:
    """What `/health` says.

    Attributes:
        status: in a word.
        reason: why it is not ``OK``; ``None`` if it is.
    """

    status: HealthStatus
    reason: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether requests are answered."""
        return self.status is HealthStatus.OK
