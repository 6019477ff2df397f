"""Health of the server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
