"""The server's side of the engine: requests in, pieces out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from draftwise.errors import DraftwiseError
from draftwise.params import RequestSpeculation, SamplingParams
from draftwise.serving.errors import EngineUnavailableError
from draftwise.serving.health import Health
from draftwise.serving.link import serialize
from draftwise.serving.messages import Add, Ask, Cancel, Ready, Turn
from draftwise.serving.metrics import Metrics
from draftwise.serving.requests import News, ServedRequest
from draftwise.serving.settings import EngineSettings
from draftwise.serving.supervisor import Supervisor

_LOG = logging.getLogger("draftwise.serving")


class EngineClient:
    """Feeds an engine in a process of its own.

    When the engine is lost its requests fail, and what comes until the next one is ready waits for
    it. Everything here runs in one event loop.

    Attributes:
        model: what is served; known once :meth:`start` is done.
    """

    model: Ready

    def __init__(
        self,
        settings: EngineSettings,
        on_turn: Callable[[Turn], None],
        metrics: Metrics,
        step_timeout: float,
    ) -> None:
        """Set up; nothing is started yet.

        Args:
            settings: of the engine.
            on_turn: called with every turn of the engine, after its requests have got theirs.
            metrics: counts how often the engine comes and goes.
            step_timeout: seconds after which an engine that does not respond is replaced.
        """
        self._on_turn = on_turn
        self._supervisor = Supervisor(settings, self, metrics, step_timeout)
        self._requests: dict[int, ServedRequest] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        # What was changed while running holds for the next engine, too.
        self._changes: dict[str, Any] = {}

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine that has loaded its models."""
        return self._supervisor.is_ready

    @property
    def health(self) -> Health:
        """Whether the engine responds now."""
        return self._supervisor.health(is_busy=bool(self._requests))

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return self._supervisor.pid

    async def start(self) -> None:
        """Load the models.

        Raises:
            DraftwiseError: they cannot be loaded.
        """
        await self._supervisor.start()

    async def close(self) -> None:
        """End the engine; requests that still run fail."""
        self._supervisor.is_closing = True
        self.engine_was_lost(EngineUnavailableError("engine", "the server stops"))
        await self._supervisor.close()

    def submit(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation,
        number: int,
        news: asyncio.Queue[News],
    ) -> ServedRequest:
        """Hand a request to the engine, or keep it for the next one while there is none.

        Args:
            prompt: its text, ``None`` if there is none.
            prompt_ids: its tokens.
            params: how to draw.
            speculation: how to speculate.
            number: of the answer among those that share ``news``.
            news: where what becomes of it is put.

        Raises:
            EngineUnavailableError: the server stops.
            InvalidParameterError: the request cannot be handed to another process.
        """
        if self._supervisor.is_closing:
            raise EngineUnavailableError("engine", "the server stops")
        command = Add(next(self._numbers), prompt, prompt_ids, params, speculation)
        request = ServedRequest(command, number, news)
        self._requests[request.key] = request
        self._supervisor.send(request.payload)
        return request

    def cancel(self, request: ServedRequest) -> None:
        """Give a request up; its place is free after the running step."""
        if self._requests.pop(request.key, None) is not None:
            self._supervisor.send(serialize(Cancel(request.key)))
        request.is_done = True

    async def speculation(self, **changes: Any) -> dict[str, Any]:
        """How the engine speculates, after some changes perhaps.

        Raises:
            InvalidParameterError: a change cannot be made; nothing is changed.
            DraftwiseError: there is no engine.
        """
        if not self.is_ready:
            raise EngineUnavailableError("engine", "it is being started; ask again")
        call = next(self._numbers)
        payload = serialize(Ask(call, changes))
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        self._supervisor.send(payload)
        try:
            described = await answer
        finally:
            self._answers.pop(call, None)
        self._changes |= changes
        return described

    # -- what the supervisor reports ---------------------------------------------------------

    def engine_is_ready(self, ready: Ready) -> None:
        """Hand the engine what was changed, and the requests that waited for it."""
        self.model = ready
        if self._changes:
            self._supervisor.send(serialize(Ask(next(self._numbers), dict(self._changes))))
        for request in self._requests.values():
            self._supervisor.send(request.payload)

    def engine_reported(self, turn: Turn) -> None:
        """Hand out what a turn of the engine brought."""
        for key in turn.added:
            if key in self._requests:
                self._requests[key].was_added()
        for key, error in turn.refused:
            request = self._requests.pop(key, None)
            if request is not None:
                request.failed(error)
        for call, described in turn.answers:
            answer = self._answers.pop(call, None)
            if answer is None or answer.done():
                continue
            if isinstance(described, DraftwiseError):
                answer.set_exception(described)
            else:
                answer.set_result(described)
        for piece in turn.pieces:
            request = self._requests.get(piece.key)
            if request is not None:
                request.gained(piece)
                if request.is_done:
                    del self._requests[piece.key]
        try:
            self._on_turn(turn)
        except Exception:
            # The metrics lack a turn; the answers do not.
            _LOG.exception("a turn of the engine could not be counted")

    def engine_was_lost(self, error: DraftwiseError) -> None:
        """Fail everything that waits for the engine."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.failed(error)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)
