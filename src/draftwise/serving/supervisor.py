"""Keeps an engine running: starts it, watches it, and starts another when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from draftwise.errors import DraftwiseError
from draftwise.serving.errors import EngineLostError, EngineUnavailableError
from draftwise.serving.health import Health, HealthStatus
from draftwise.serving.link import EngineLink, serialize
from draftwise.serving.liveness import PING_SECONDS, Liveness
from draftwise.serving.messages import Failed, Ping, Ready, Report, Turn
from draftwise.serving.metrics import Metrics
from draftwise.serving.settings import EngineSettings

_LOG = logging.getLogger("draftwise.serving")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


class EngineListener(Protocol):
    """What follows an engine that comes and goes."""

    def engine_is_ready(self, ready: Ready) -> None:
        """Its models are loaded."""

    def engine_reported(self, turn: Turn) -> None:
        """It has followed commands or finished a step."""

    def engine_was_lost(self, error: DraftwiseError) -> None:
        """It is gone with everything that it had."""


class Supervisor:
    """Owns the engine's process. Everything here runs in one event loop.

    Attributes:
        is_ready: whether there is an engine that has loaded its models.
        is_closing: whether the server stops; no other engine is started then.
        num_restarts: engines that were lost.
    """

    def __init__(
        self,
        settings: EngineSettings,
        listener: EngineListener,
        metrics: Metrics,
        step_timeout: float,
    ) -> None:
        """Set up; nothing is started yet.

        Args:
            settings: of the engine.
            listener: called when the engine is ready, reports, or is lost.
            metrics: counts how often the engine comes and goes.
            step_timeout: seconds after which an engine that does not respond is replaced.
        """
        self.is_ready = self.is_closing = False
        self.num_restarts = 0
        self._settings, self._listener, self._metrics = settings, listener, metrics
        self._step_timeout = step_timeout
        self._liveness = Liveness(step_timeout)
        self._link: EngineLink | None = None
        self._pause = _FIRST_PAUSE_SECONDS
        self._first: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._monitor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._link is None else self._link.process.pid

    def health(self, is_busy: bool) -> Health:
        """Whether the engine responds now.

        Args:
            is_busy: it has requests, so that a long step may be running.
        """
        if self.is_closing:
            return Health(HealthStatus.STOPPING, "the server stops")
        if self._link is None or not self.is_ready:
            return Health(HealthStatus.STARTING, "the engine is being loaded")
        if self._monitor is None or self._monitor.done():
            return Health(HealthStatus.STALLED, "the engine is not watched any more")
        if self._liveness.is_stalled(is_busy):
            seconds = self._liveness.silent_seconds
            return Health(
                HealthStatus.STALLED, f"the engine has not responded for {seconds:.1f} seconds"
            )
        return Health(HealthStatus.OK)

    async def start(self) -> None:
        """Load the models.

        Raises:
            DraftwiseError: they cannot be loaded.
        """
        self._first = asyncio.get_running_loop().create_future()
        self._begin()
        self._monitor = asyncio.create_task(self._watch())
        await self._first

    async def close(self) -> None:
        """End the engine."""
        self.is_closing = True
        if self._first is not None and not self._first.done():
            self._first.set_exception(EngineUnavailableError("engine", "the server stops"))
            self._first.exception()  # nobody may be waiting
        for task in (self._monitor, self._restart):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        link, self._link = self._link, None
        if link is not None:
            await asyncio.to_thread(link.close)

    def send(self, command: bytes) -> None:
        """Send a serialised command, if there is an engine that can follow it."""
        if self._link is not None and self.is_ready:
            self._link.send(command)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()

        def later(act: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(act, *arguments)

        self._liveness = Liveness(self._step_timeout)
        link = EngineLink(
            self._settings,
            lambda report: later(self._receive, link, report),
            lambda: later(self._ended, link),
        )
        self._link = link

    async def _watch(self) -> None:
        """Ping the engine twice a second, and give it up if it does not answer."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            try:
                self._look()
            except Exception:
                _LOG.exception("the engine could not be watched")

    def _look(self) -> None:
        if self._link is None or not self.is_ready:
            return
        if self._liveness.is_lost:
            self._link.lose(f"it did not respond for {self._step_timeout:g} seconds")
        elif self._liveness.asked():
            self._link.send(serialize(Ping()))

    def _receive(self, link: EngineLink, report: Report) -> None:
        if link is not self._link:
            return  # of an engine that was given up
        try:
            self._follow(report)
        except Exception as error:
            # What the report said is lost, and requests would wait for it without end.
            _LOG.exception("a report of the engine could not be followed")
            link.lose(f"a report could not be followed: {error!r}")

    def _follow(self, report: Report) -> None:
        match report:
            case Turn(step=step):
                self._liveness.reported(None if step is None else sum(step.seconds.values()))
                self._listener.engine_reported(report)
            case Ready():
                self.is_ready = True
                self._pause = _FIRST_PAUSE_SECONDS
                self._listener.engine_is_ready(report)
                if self._first is not None and not self._first.done():
                    self._first.set_result(None)
                details = {"pid": self.pid, "restarts": self.num_restarts}
                _LOG.info("the engine is ready", extra=details)
            case Failed(error, at_start):
                _LOG.error("the engine failed", extra={"reason": str(error)})
                if at_start and self._first is not None and not self._first.done():
                    self._first.set_exception(error)
                    self.is_closing = True

    def _ended(self, link: EngineLink) -> None:
        """The process is gone."""
        if self.is_closing or link is not self._link:
            return
        was_ready, self.is_ready = self.is_ready, False
        self._link = None
        if self._first is not None and not self._first.done():
            self._first.set_exception(
                EngineUnavailableError("engine", "its process ended while it was loading")
            )
            return
        if was_ready:
            self.num_restarts += 1
            self._metrics.engine_was_lost()
            self._listener.engine_was_lost(
                EngineLostError("engine", "it was lost; a new one is started, ask again")
            )
        self._restart = asyncio.create_task(self._begin_again(link))

    async def _begin_again(self, lost: EngineLink) -> None:
        await asyncio.to_thread(lost.close)
        while not self.is_closing:
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            try:
                self._begin()
            except Exception:
                # Too many processes or files, for example: that may pass.
                _LOG.exception("a new engine could not be started")
            else:
                return
