"""Error responses in OpenAI's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from draftwise.errors import (
    CacheExhaustedError,
    DraftwiseError,
    InvalidParameterError,
    NumericalError,
    PromptError,
)
from draftwise.serving.errors import (
    DeadlineExceededError,
    EngineFaultError,
    EngineLostError,
    EngineUnavailableError,
    OverloadedError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedMediaTypeError,
)
from draftwise.serving.schemas.body import quoted

# HTTP status and OpenAI's error type.
_KINDS: dict[type[DraftwiseError], tuple[int, str]] = {
    InvalidParameterError: (400, "invalid_request_error"),
    PromptError: (400, "invalid_request_error"),
    CacheExhaustedError: (400, "invalid_request_error"),
    UnauthorizedError: (401, "authentication_error"),
    UnknownModelError: (404, "not_found_error"),
    TooLargeError: (413, "invalid_request_error"),
    UnsupportedMediaTypeError: (415, "invalid_request_error"),
    OverloadedError: (429, "rate_limit_error"),
    NumericalError: (500, "server_error"),
    EngineFaultError: (500, "server_error"),
    EngineLostError: (503, "server_error"),
    EngineUnavailableError: (503, "server_error"),
    DeadlineExceededError: (504, "timeout_error"),
}
_RETRY_SECONDS = 2
# Error types of pydantic, and the values that are accepted.
_ACCEPTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
_PYDANTIC_PREFIX = "Input should be"


def status_of(error: DraftwiseError) -> int:
    """HTTP status of an error."""
    return _KINDS.get(type(error), (500, ""))[0]


def error_body(error: DraftwiseError) -> dict[str, Any]:
    """Response body of an error."""
    status, kind = _KINDS.get(type(error), (500, "server_error"))
    return _body(str(error), kind, error.field, status)


def error_response(error: DraftwiseError) -> JSONResponse:
    """Response for an error."""
    status = status_of(error)
    headers = {}
    if isinstance(error, OverloadedError):
        # Retry-After is in whole seconds; OpenAI's clients prefer the header in milliseconds.
        headers["Retry-After"] = str(math.ceil(error.retry_after))
        headers["retry-after-ms"] = str(math.ceil(1000 * error.retry_after))
    elif status == 503:
        headers["Retry-After"] = str(_RETRY_SECONDS)
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """Exception handler for :class:`DraftwiseError`."""
    assert isinstance(error, DraftwiseError)
    return error_response(error)


async def answer_invalid(_: Request, error: Exception) -> JSONResponse:
    """Exception handler for bodies that do not match the schema; names the first invalid field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        message, field = f"the body is not JSON: {why}", None
    else:
        message, field = explain(first)
    return JSONResponse(_body(message, "invalid_request_error", field, 400), 400)


async def answer_http(_: Request, error: Exception) -> JSONResponse:
    """Exception handler for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return JSONResponse(
        _body(str(error.detail), kind, None, error.status_code),
        error.status_code,
        dict(error.headers or {}),
    )


def _body(message: str, kind: str, field: str | None, status: int) -> dict[str, Any]:
    # The code is a number, as in vLLM.
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def explain(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """Convert a validation error to a message and a field.

    Args:
        error: an item of ``RequestValidationError.errors()``. The first component of its location
            is the part of the request, such as ``"body"``.

    Returns:
        The message, which begins with the field, and the field as a path such as
        ``"messages[3].content"``, or ``None`` for the body as a whole.
    """
    path = _path(error["loc"][1:])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "draftwise":
        message, at = context["message"], context["at"]
        path += at if not path or not at or at.startswith("[") else f".{at}"
    elif kind == "missing":
        message = "is required"
    elif kind in _ACCEPTED:
        message = f"must be {_ACCEPTED[kind]}, got {quoted(error['input'])}"
    elif error["msg"].startswith(_PYDANTIC_PREFIX):
        message = f"must be{error['msg'].removeprefix(_PYDANTIC_PREFIX)}"
    else:
        message = error["msg"]
    return f"{path or 'the body'}: {message}", path or None


def _path(places: Sequence[str | int]) -> str:
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        else:
            path += f".{place}" if path else place
    return path
