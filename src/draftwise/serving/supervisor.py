"""Supervision of the engine's process: start, health checks and restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from draftwise.errors import DraftwiseError
from draftwise.serving.errors import EngineLostError, EngineUnavailableError
from draftwise.serving.health import PING_SECONDS, Health, HealthStatus, Liveness
from draftwise.serving.link import EngineLink, serialize
from draftwise.serving.messages import EngineOutputs, Failed, Ping, Ready, Report
from draftwise.serving.metrics import Metrics
from draftwise.serving.settings import EngineSettings

_LOG = logging.getLogger("draftwise.serving")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


class EngineListener(Protocol):
    """Callbacks for events of the engine."""

    def engine_is_ready(self, ready: Ready) -> None:
        """The engine has loaded its models."""

    def engine_reported(self, outputs: EngineOutputs) -> None:
        """The engine has executed commands or a step."""

    def engine_was_lost(self, error: DraftwiseError) -> None:
        """The engine was lost with all of its requests."""


class Supervisor:
    """Owns the engine's process. All methods run in one event loop.

    Attributes:
        is_ready: whether the engine has loaded its models.
        is_closing: whether the server is shutting down, in which case the engine is not restarted.
        num_restarts: number of lost engines.
    """

    def __init__(
        self,
        settings: EngineSettings,
        listener: EngineListener,
        metrics: Metrics,
        step_timeout: float,
    ) -> None:
        """Create the supervisor; the engine is not started yet.

        Args:
            settings: settings of the engine.
            listener: called when the engine is ready, reports, or is lost.
            metrics: metrics that count restarts of the engine.
            step_timeout: seconds after which an unresponsive engine is restarted.
        """
        self.is_ready = self.is_closing = False
        self.num_restarts = 0
        self._settings, self._listener, self._metrics = settings, listener, metrics
        self._step_timeout = step_timeout
        self._liveness = Liveness(step_timeout)
        self._link: EngineLink | None = None
        self._pause = _FIRST_PAUSE_SECONDS
        self._first_ready: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._monitor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return None if self._link is None else self._link.process.pid

    def health(self, is_busy: bool) -> Health:
        """Health of the engine.

        Args:
            is_busy: whether the engine has requests, so that a long step may be running.
        """
        if self.is_closing:
            return Health(HealthStatus.STOPPING, "the server is shutting down")
        if self._link is None or not self.is_ready:
            return Health(HealthStatus.STARTING, "the engine is being loaded")
        if self._monitor is None or self._monitor.done():
            return Health(HealthStatus.STALLED, "the engine is no longer monitored")
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
        self._first_ready = asyncio.get_running_loop().create_future()
        self._begin()
        self._monitor = asyncio.create_task(self._watch())
        await self._first_ready

    async def close(self) -> None:
        """Stop the engine."""
        self.is_closing = True
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(
                EngineUnavailableError("engine", "the server is shutting down")
            )
            self._first_ready.exception()  # nobody may be waiting
        for task in (self._monitor, self._restart):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        link, self._link = self._link, None
        if link is not None:
            await asyncio.to_thread(link.close)

    def send(self, command: bytes) -> None:
        """Send a serialised command if the engine is ready; otherwise drop it."""
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
        # The first report may come at once, and the calls above refer to the link.
        link.start()

    async def _watch(self) -> None:
        """Ping the engine twice a second, and report it as lost if it does not respond."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            try:
                self._check_liveness()
            except Exception:
                _LOG.exception("the liveness of the engine could not be checked")

    def _check_liveness(self) -> None:
        if self._link is None or not self.is_ready:
            return
        if self._liveness.is_lost:
            self._link.lose(f"it did not respond for {self._step_timeout:g} seconds")
        elif self._liveness.asked():
            self._link.send(serialize(Ping()))

    def _receive(self, link: EngineLink, report: Report) -> None:
        if link is not self._link:
            return  # from an earlier engine
        try:
            self._process(report)
        except Exception as error:
            # Requests would wait forever for the outputs in the report.
            _LOG.exception("a report of the engine could not be processed")
            link.lose(f"a report could not be processed: {error!r}")

    def _process(self, report: Report) -> None:
        match report:
            case EngineOutputs(step=step):
                self._liveness.reported(None if step is None else sum(step.seconds.values()))
                self._listener.engine_reported(report)
            case Ready(warnings=warnings, eos_token_ids=eos):
                for line in warnings:
                    _LOG.warning(line)
                self.is_ready = True
                self._pause = _FIRST_PAUSE_SECONDS
                self._listener.engine_is_ready(report)
                if self._first_ready is not None and not self._first_ready.done():
                    self._first_ready.set_result(None)
                details = {
                    "pid": self.pid,
                    "restarts": self.num_restarts,
                    "eos_token_ids": list(eos),
                }
                _LOG.info("the engine is ready", extra=details)
            case Failed(error, at_start):
                _LOG.error("the engine failed", extra={"reason": str(error)})
                if at_start and self._first_ready is not None and not self._first_ready.done():
                    self._first_ready.set_exception(error)
                    self.is_closing = True

    def _ended(self, link: EngineLink) -> None:
        """Handle the end of the process."""
        if self.is_closing or link is not self._link:
            return
        was_ready, self.is_ready = self.is_ready, False
        self._link = None
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(
                EngineUnavailableError("engine", "its process ended while it was loading")
            )
            return
        if was_ready:
            self.num_restarts += 1
            self._metrics.engine_was_lost()
            self._listener.engine_was_lost(
                EngineLostError("engine", "its process ended; it is being restarted, try again")
            )
        self._restart = asyncio.create_task(self._start_again(link))

    async def _start_again(self, lost: EngineLink) -> None:
        await asyncio.to_thread(lost.close)
        while not self.is_closing:
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            try:
                self._begin()
            except Exception:
                # The cause may be temporary, such as too many processes or open files.
                _LOG.exception("a new engine could not be started")
            else:
                return
