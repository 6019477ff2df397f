"""Middleware: a limit on the size of request bodies, and the access log."""

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
# Paths that web pages and monitors poll every second.
_POLLED = {"/health", "/metrics", "/v1/stats", "/v1/speculation"}
# Request ids of clients that match are logged and returned; others are replaced.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class BodyLimit:
    """Limits the size of request bodies."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Wrap an application."""
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a body that is too large, by its Content-Length or while it is received."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = error_response(
            TooLargeError("body", f"is larger than {self._max_bytes} bytes, the allowed maximum")
        )
        content_length = Headers(scope=scope).get("content-length", "")
        if content_length.isdecimal() and int(content_length) > self._max_bytes:
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
                # The application stops as if the client had disconnected.
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
    """Logs method, path, status and duration of each request, but not its contents."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Assign an id to the request, and log it after its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        start, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            polled = scope["method"] == "GET" and scope["path"] in _POLLED
            _LOG.log(
                logging.DEBUG if polled else logging.INFO,
                "request",
                extra={
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.monotonic() - start, 4),
                },
            )
