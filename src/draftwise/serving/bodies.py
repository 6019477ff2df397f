"""API keys and bodies of requests, which must be uncompressed JSON of limited nesting."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.security.utils import get_authorization_scheme_param
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from draftwise.errors import InvalidParameterError
from draftwise.serving.errors import UnauthorizedError, UnsupportedMediaTypeError

# The client does not receive this status; it appears in the access log.
CLIENT_CLOSED = 499


class _ParsedRequest(Request):
    """A request whose body has already been parsed."""

    parsed: Any = None

    async def json(self) -> Any:
        """The parsed body."""
        return self.parsed


class JsonRoute(APIRoute):
    """A route that parses its body before the framework validates it.

    The parser rejects more than 200 levels of nesting. Code that recurses over deeper values would
    exceed Python's recursion limit.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler, called after the body has been parsed."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def parse_and_handle(request: Request) -> Response:
            parsed = _ParsedRequest(request.scope, request.receive)
            # Before the body is read.
            authorize(parsed)
            _check_headers(parsed)
            try:
                body = await parsed.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            parsed.parsed = _parse(body)
            return await handle(parsed)

        return parse_and_handle


def authorize(request: Request) -> None:
    """Check the API key of a request, if the server has keys, and note which one it is.

    Raises:
        UnauthorizedError: the key is missing or unknown.
    """
    keys = request.app.state.service.settings.api_keys
    scheme, token = get_authorization_scheme_param(request.headers.get("Authorization"))
    if scheme.lower() != "bearer":
        token = ""
    # Compare with all keys in constant time, so that timing reveals nothing about them.
    matches = [hmac.compare_digest(token.encode(), key.encode()) for key in keys]
    if keys and not any(matches):
        raise UnauthorizedError("api_key", "missing or invalid: send Authorization: Bearer KEY")
    request.state.client = str(matches.index(True)) if keys else ""


def _check_headers(request: Request) -> None:
    """Check the content type and encoding.

    Raises:
        UnsupportedMediaTypeError: the body is compressed, or its content type is not JSON.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaTypeError(
            "content-encoding", f"{encoding!r} is not supported; send the body uncompressed"
        )
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        found = f"it is {given!r}" if given else "the request has none"
        raise UnsupportedMediaTypeError(
            "content-type",
            f"must be application/json and {found}; send Content-Type: application/json",
        )


def _parse(body: bytes) -> Any:
    """Parse a body.

    Raises:
        InvalidParameterError: the body is not JSON, or is nested too deeply.
    """
    if not body.strip():
        raise InvalidParameterError("body", "is empty; send a JSON object")
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise InvalidParameterError("body", f"is nested too deeply: {error}") from None
        if "hex escape" in str(error):
            raise InvalidParameterError(
                "body", f"has an unpaired surrogate in a string: {error}"
            ) from None
        raise InvalidParameterError("body", f"is not JSON: {error}") from None
