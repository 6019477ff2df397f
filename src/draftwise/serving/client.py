"""The server's side of the engine: requests in, pieces out, and a new engine if one is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from draftwise.errors import DraftwiseError
from draftwise.params import RequestSpeculation, SamplingParams
from draftwise.serving.errors import EngineLostError, EngineUnavailableError
from draftwise.serving.link import EngineLink
from draftwise.serving.messages import Add, Ask, Cancel, Failed, Ready, Report, Turn
from draftwise.serving.metrics import Metrics
from draftwise.serving.requests import News, ServedRequest
from draftwise.serving.settings import EngineSettings

_LOG = logging.getLogger("draftwise.serving")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


class EngineClient:
    """Feeds an engine in a process of its own, and starts another when it is lost.

    Everything here runs in one event loop.

    Attributes:
        model: what is served; known once :meth:`start` is done.
        is_ready: whether there is an engine now.
        num_restarts: engines that were lost.
    """

    model: Ready

    def __init__(
        self, settings: EngineSettings, on_turn: Callable[[Turn], None], metrics: Metrics
    ) -> None:
        """Nothing is started yet.

        Args:
            settings: of the engine.
            on_turn: is told of every turn of the engine, before the requests are.
            metrics: is told when the engine comes and goes.
        """
        self.settings = settings
        self.is_ready = False
        self.num_restarts = 0
        self._on_turn, self._metrics = on_turn, metrics
        self._link: EngineLink | None = None
        self._requests: dict[int, ServedRequest] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        # What was changed while running holds for the next engine, too.
        self._changes: dict[str, Any] = {}
        self._closing = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._first: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._link is None else self._link.process.pid

    async def start(self) -> None:
        """Load the models.

        Raises:
            DraftwiseError: they cannot be loaded.
        """
        self._first = asyncio.get_running_loop().create_future()
        self._begin()
        await self._first

    async def close(self) -> None:
        """End the engine; requests that still run fail."""
        self._closing = True
        if self._restart is not None:
            self._restart.cancel()
            with suppress(asyncio.CancelledError):
                await self._restart
        link, self._link = self._link, None
        self._lose(EngineUnavailableError("engine", "the server stops"))
        if link is not None:
            await asyncio.to_thread(link.close)

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
        """
        if self._closing:
            raise EngineUnavailableError("engine", "the server stops")
        command = Add(next(self._numbers), prompt, prompt_ids, params, speculation)
        request = ServedRequest(command, number, news)
        self._requests[command.key] = request
        if self._link is not None and self.is_ready:
            self._link.send(command)
        return request

    def cancel(self, request: ServedRequest) -> None:
        """Nobody waits for it any more; its place is free after the running step."""
        if self._requests.pop(request.key, None) is not None and self._link is not None:
            self._link.send(Cancel(request.key))
        request.is_done = True

    async def speculation(self, **changes: Any) -> dict[str, Any]:
        """How the engine speculates, after some changes perhaps.

        Raises:
            InvalidParameterError: a change cannot be made; nothing is changed.
            DraftwiseError: there is no engine.
        """
        if self._link is None or not self.is_ready:
            raise EngineUnavailableError("engine", "it is being started; ask again")
        call = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        self._link.send(Ask(call, changes))
        described = await answer
        self._changes |= changes
        return described

    # -- the engine's process ----------------------------------------------------------------

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()

        def later(act: Callable[..., None], *what: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(act, *what)

        self._link = EngineLink(
            self.settings,
            lambda report: later(self._receive, report),
            lambda: later(self._ended),
        )

    def _receive(self, report: Report) -> None:
        match report:
            case Turn():
                self._settle(report)
            case Ready():
                self._greet(report)
            case Failed(error, at_start):
                _LOG.error("the engine failed", extra={"reason": str(error)})
                if at_start and self._first is not None and not self._first.done():
                    self._first.set_exception(error)
                    self._closing = True

    def _greet(self, ready: Ready) -> None:
        """An engine is there: it gets what was changed and who waited for it."""
        assert self._link is not None
        self.model, self.is_ready = ready, True
        self._metrics.engine_is_up(True)
        self._pause = _FIRST_PAUSE_SECONDS
        if self._changes:
            self._link.send(Ask(next(self._numbers), dict(self._changes)))
        for request in self._requests.values():
            self._link.send(request.command)
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        _LOG.info("the engine is ready", extra={"pid": self.pid, "restarts": self.num_restarts})

    def _settle(self, turn: Turn) -> None:
        self._on_turn(turn)
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

    def _ended(self) -> None:
        """The process is gone."""
        if self._closing or self._link is None:
            if self._first is not None and not self._first.done():
                self._first.set_exception(
                    EngineUnavailableError("engine", "its process ended while it was loading")
                )
            return
        was_ready, self.is_ready = self.is_ready, False
        self._metrics.engine_is_up(False)
        link, self._link = self._link, None
        code = link.process.exitcode
        _LOG.error("the engine's process is gone", extra={"exit_code": code})
        if self._first is not None and not self._first.done():
            self._first.set_exception(
                EngineUnavailableError(
                    "engine", f"its process ended while it was loading (exit status {code})"
                )
            )
            return
        if was_ready:
            self.num_restarts += 1
            self._metrics.engine_was_lost()
            self._lose(
                EngineLostError("engine", "its process ended; a new one is started, ask again")
            )
        self._restart = asyncio.get_running_loop().create_task(self._begin_again(link))

    async def _begin_again(self, lost: EngineLink) -> None:
        await asyncio.to_thread(lost.close)
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        if not self._closing:
            self._begin()

    def _lose(self, error: DraftwiseError) -> None:
        """Everybody who waits is told why nothing comes."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.failed(error)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)
