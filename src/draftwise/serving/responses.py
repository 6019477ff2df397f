"""Answers on the wire: whole or as events, and nothing more once the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwise.errors import DraftwiseError
from draftwise.serving.answers import AnswerForm, Gathered, Json, usage
from draftwise.serving.generation import Generation
from draftwise.serving.http_errors import error_body, error_response
from draftwise.serving.schemas import StreamOptions

_DONE = b"data: [DONE]\n\n"
_GRACE_SECONDS = 5.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
T = TypeVar("T")


class ClientGoneError(Exception):
    """Whoever asked has closed the connection."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do something for a client, and stop when it closes the connection.

    Args:
        receive: of the request, whose body was read.
        work: cancelled if the client goes.

    Raises:
        ClientGoneError: it went.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole_answer(generation: Generation, form: AnswerForm) -> Json:
    """All answers, once they have ended.

    Raises:
        DraftwiseError: one failed.
    """
    answers = [Gathered() for _ in generation.questions]
    async with generation:
        async for number, piece in generation.pieces():
            answers[number].add(piece)
    return form.whole(answers, usage(generation.num_prompt_tokens, generation.progress))


class EventStream(Response):
    """The answers as server-sent events, each as soon as there is something to say.

    The status is only sent once the engine has taken the requests, so that a refusal is one.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, form: AnswerForm, options: StreamOptions | None
    ) -> None:
        """Set up; nothing is asked for yet."""
        super().__init__(headers=_HEADERS)
        del self.raw_headers[[key for key, _ in self.raw_headers].index(b"content-length")]
        self._generation, self._form = generation, form
        self._options = options or StreamOptions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        patience = self._generation.seconds_left + _GRACE_SECONDS
        try:
            # Who does not read what was written in time is taken for gone.
            async with asyncio.timeout(patience), self._generation:
                await self._send_events(send)
        except TimeoutError:
            raise ClientGoneError from None
        except DraftwiseError as error:
            # Nothing was sent: the engine did not take it.
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
        generation, form, options = self._generation, self._form, self._options
        for number in range(len(generation.questions)):
            opening = form.opening(number)
            if opening is not None:
                yield _event(opening)
        async for number, piece in generation.pieces():
            chunk = form.chunk(number, piece)
            if chunk is None:
                continue
            if options.continuous_usage_stats:
                chunk["usage"] = usage(generation.num_prompt_tokens, generation.progress)
            yield _event(chunk)
        if options.include_usage:
            yield _event(form.usage_chunk(usage(generation.num_prompt_tokens, generation.progress)))
        yield _DONE


def _event(value: Json) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
