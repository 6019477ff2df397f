"""What every request passes: a limit on its body, and a line in the log."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwise.serving.errors import TooLargeError
from draftwise.serving.http_errors import error_response

_LOG = logging.getLogger("draftwise.access")
# Asked for every second by pages and monitors.
_POLLED = {"/health", "/metrics", "/v1/stats", "/v1/speculation"}
# A client's own number of a request goes into logs and back; anything else is replaced.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class BodyLimit:
    """Reads no more of a body than is allowed."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Stand before an application."""
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a long body as soon as it is known to be one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = error_response(
            TooLargeError("body", f"is longer than the {self._max_bytes} bytes allowed")
        )
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told) > self._max_bytes:
            await refusal(scope, receive, send)
            return
        num_bytes = 0
        too_long = started = False

        async def limited() -> Message:
            nonlocal num_bytes, too_long
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                too_long = True
                # For the application the client is gone.
                return {"type": "http.disconnect"}
            return message

        async def guarded(message: Message) -> None:
            nonlocal started
            if not too_long:
                started = True
                await send(message)

        try:
            await self._app(scope, limited, guarded)
        finally:
            if too_long and not started:
                await refusal(scope, receive, send)


class AccessLog:
    """Writes a line for every request, of its kind and time and nothing of what it said."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request a number, and take its time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(number):
            number = secrets.token_hex(8)
        start, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = number
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            polled = scope["method"] == "GET" and scope["path"] in _POLLED
            _LOG.log(
                logging.DEBUG if polled else logging.INFO,
                "request",
                extra={
                    "request_id": number,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.monotonic() - start, 4),
                },
            )
