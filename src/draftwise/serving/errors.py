"""What can go wrong between a client and the engine."""

from __future__ import annotations

from draftwise.errors import DraftwiseError


class EngineLostError(DraftwiseError):
    """The engine's process ended while the request ran; asking again may help."""


class EngineFaultError(DraftwiseError):
    """The engine could not take a request for a reason that is a fault of Draftwise."""


class EngineUnavailableError(DraftwiseError):
    """There is no engine now, because it cannot be started or the server is about to stop."""


class DeadlineExceededError(DraftwiseError):
    """A request was not done in the time that the server gives."""


class OverloadedError(DraftwiseError):
    """As many requests wait as may wait.

    Attributes:
        retry_after: seconds after which there is likely room.
    """

    def __init__(self, field: str, message: str, retry_after: float) -> None:
        super().__init__(field, message)
        self.retry_after = retry_after


class TooLargeError(DraftwiseError):
    """A body is longer than the server reads."""


class UnsupportedMediaTypeError(DraftwiseError):
    """A body is not JSON by its headers, or is compressed."""


class UnauthorizedError(DraftwiseError):
    """A request came without a valid key."""


class UnknownModelError(DraftwiseError):
    """A request names a model that is not served here."""
