"""HTTP responses with answers, complete or streamed, which stop when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwise.errors import DraftwiseError
from draftwise.serving.answers import AnswerFormat, Json, counts, joined, usage
from draftwise.serving.generation import Generation
from draftwise.serving.http_errors import error_body, error_response
from draftwise.serving.messages import Piece
from draftwise.serving.schemas import StreamOptions

_DONE = b"data: [DONE]\n\n"
_GRACE_SECONDS = 5.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client has closed the connection."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Run work for a client and cancel it when the client disconnects.

    Args:
        receive: channel of the request, whose body has been read.
        work: cancelled when the client disconnects.

    Raises:
        ClientDisconnectedError: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        for each in (task, disconnect):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(generation: Generation, answer_format: AnswerFormat) -> Json:
    """Generate all answers and return the complete response body.

    Raises:
        DraftwiseError: an answer failed.
    """
    pieces: list[list[Piece]] = [[] for _ in generation.specs]
    async with generation:
        async for number, piece in generation.pieces():
            pieces[number].append(piece)
    return answer_format.whole([joined(each) for each in pieces], counts(generation))


class EventStream(Response):
    """A stream of answers as server-sent events.

    The status is sent after the engine has accepted the requests, so that rejected requests get an
    error status.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, answer_format: AnswerFormat, options: StreamOptions | None
    ) -> None:
        """Create the response; the generation is not started yet."""
        super().__init__(headers=_HEADERS)
        del self.raw_headers[[key for key, _ in self.raw_headers].index(b"content-length")]
        self._generation, self._format = generation, answer_format
        self._options = options or StreamOptions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with contextlib.suppress(ClientDisconnectedError):
            await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout = self._generation.deadline.seconds_left + _GRACE_SECONDS
        try:
            # A client that does not read the events before the timeout counts as disconnected.
            async with asyncio.timeout(timeout), self._generation:
                await self._send_events(send)
        except TimeoutError:
            raise ClientDisconnectedError from None
        except DraftwiseError as error:
            # The engine rejected the requests, and nothing was sent yet.
            await error_response(error)(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except DraftwiseError as error:
            last = _event(error_body(error)) + _DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        generation, answer_format, options = self._generation, self._format, self._options
        for number in range(len(generation.specs)):
            opening = answer_format.opening(number)
            if opening is not None:
                yield _event(opening)
        async for number, piece in generation.pieces():
            chunk = answer_format.chunk(number, piece)
            if chunk is None:
                continue
            if options.continuous_usage_stats:
                chunk["usage"] = usage(generation)
            yield _event(chunk)
        if options.include_usage:
            yield _event(answer_format.usage_chunk(counts(generation)))
        yield _DONE


def _event(value: Json) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
