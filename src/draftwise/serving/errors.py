"""Errors of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from draftwise.errors import DraftwiseError, InvalidParameterError


class EngineLostError(DraftwiseError):
    """The process of the engine ended while the request ran; the client may retry."""


class EngineFaultError(DraftwiseError):
    """The engine could not accept or continue a request because of an internal error."""


class EngineUnavailableError(DraftwiseError):
    """There is no engine, because it cannot be started or the server is shutting down."""


class DeadlineExceededError(DraftwiseError):
    """A request was not completed before the request timeout."""


class OverloadedError(DraftwiseError):
    """The queue is full.

    Attributes:
        retry_after: seconds after which the queue is expected to have room.
    """

    def __init__(self, field: str, message: str, retry_after: float) -> None:
        super().__init__(field, message)
        self.retry_after = retry_after


class TooLargeError(DraftwiseError):
    """A request body is larger than the server allows."""


class UnsupportedMediaTypeError(DraftwiseError):
    """The content type of a request is not JSON, or its body is compressed."""


class UnauthorizedError(DraftwiseError):
    """A request has no valid API key."""


class UnknownModelError(DraftwiseError):
    """A request names a model that is not served."""


@contextmanager
def grammar_errors_named(field: str | None) -> Iterator[None]:
    """Let errors about the grammar of the answers name the field of the body that defines it.

    Args:
        field: the field; ``None`` for ``structured_outputs``.
    """
    try:
        yield
    except InvalidParameterError as error:
        if field is None or not error.field.startswith("structured_outputs"):
            raise
        raise InvalidParameterError(field, error.message) from error
