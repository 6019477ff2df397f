"""Client of the engine's process: submits requests and distributes their outputs."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from draftwise.errors import DraftwiseError
from draftwise.params import SamplingParams
from draftwise.serving.errors import EngineUnavailableError
from draftwise.serving.health import Health
from draftwise.serving.link import serialize
from draftwise.serving.messages import Add, Cancel, EngineOutputs, Piece, Ready, UpdateSpeculation
from draftwise.serving.metrics import Metrics
from draftwise.serving.settings import EngineSettings
from draftwise.serving.supervisor import Supervisor
from draftwise.speculation import RequestSpeculation

_LOG = logging.getLogger("draftwise.serving")
# Index of an answer, and its new piece or its error.
RequestUpdate = tuple[int, Piece | DraftwiseError]


class ServedRequest:
    """One request of the engine, which generates one answer to one prompt.

    Attributes:
        key: key of the request, unique within the server.
        payload: serialised command that adds the request to the engine.
        is_done: whether the request has ended.
    """

    def __init__(self, command: Add, number: int, updates: asyncio.Queue[RequestUpdate]) -> None:
        """Create the handle; nothing is sent yet.

        Args:
            command: command that adds the request to the engine.
            number: index of the answer among those to the same body.
            updates: queue for pieces and errors of the request.

        Raises:
            InvalidParameterError: the command cannot be serialised.
        """
        self.key = command.key
        self.payload = serialize(command)
        self.is_done = False
        self._number, self._updates = number, updates
        self._added: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def added(self) -> None:
        """Wait until the engine has accepted the request.

        Raises:
            DraftwiseError: the engine rejected the request.
        """
        await asyncio.shield(self._added)

    def mark_added(self) -> None:
        """Record that the engine has accepted the request."""
        if not self._added.done():
            self._added.set_result(None)

    def add_piece(self, piece: Piece) -> None:
        """Forward a piece of the answer."""
        self.is_done = piece.finish_reason is not None
        self._updates.put_nowait((self._number, piece if piece.error is None else piece.error))

    def fail(self, error: DraftwiseError) -> None:
        """End the request with an error."""
        self.is_done = True
        if not self._added.done():
            self._added.set_exception(error)
            # Mark the exception as retrieved, as nobody may be waiting any more.
            self._added.exception()
        self._updates.put_nowait((self._number, error))


class EngineClient:
    """Client of an engine in another process.

    When the engine is lost, its requests fail. Requests that arrive before the next engine is ready
    wait for it. All methods run in one event loop.

    Attributes:
        model: description of the served model; set by :meth:`start`.
    """

    model: Ready

    def __init__(
        self,
        settings: EngineSettings,
        on_outputs: Callable[[EngineOutputs], None],
        metrics: Metrics,
        step_timeout: float,
    ) -> None:
        """Create the client; the engine is not started yet.

        Args:
            settings: settings of the engine.
            on_outputs: called with all outputs of the engine, after they were distributed.
            metrics: metrics that count restarts of the engine.
            step_timeout: seconds after which an unresponsive engine is restarted.
        """
        self._on_outputs = on_outputs
        self._supervisor = Supervisor(settings, self, metrics, step_timeout)
        self._requests: dict[int, ServedRequest] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        # Changes of the speculation settings, which also apply to the next engine, and those that
        # the engine has not confirmed, by call.
        self._changes: dict[str, Any] = {}
        self._unconfirmed: dict[int, dict[str, Any]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the engine has loaded its models."""
        return self._supervisor.is_ready

    @property
    def health(self) -> Health:
        """Health of the engine."""
        return self._supervisor.health(is_busy=bool(self._requests))

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._supervisor.pid

    async def start(self) -> None:
        """Load the models.

        Raises:
            DraftwiseError: they cannot be loaded.
        """
        await self._supervisor.start()

    async def close(self) -> None:
        """Stop the engine; running requests fail."""
        self._supervisor.is_closing = True
        self.engine_was_lost(EngineUnavailableError("engine", "the server is shutting down"))
        await self._supervisor.close()

    def submit(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation,
        number: int,
        updates: asyncio.Queue[RequestUpdate],
    ) -> ServedRequest:
        """Send a request to the engine; without an engine, keep it for the next one.

        Args:
            prompt: text of the prompt; ``None`` if token ids were given.
            prompt_ids: token ids of the prompt.
            params: sampling parameters.
            speculation: speculation settings.
            number: index of the answer among those that share ``updates``.
            updates: queue for pieces and errors of the request.

        Raises:
            EngineUnavailableError: the server is shutting down.
            InvalidParameterError: the request cannot be serialised.
        """
        if self._supervisor.is_closing:
            raise EngineUnavailableError("engine", "the server is shutting down")
        command = Add(next(self._numbers), prompt, prompt_ids, params, speculation)
        request = ServedRequest(command, number, updates)
        self._requests[request.key] = request
        self._supervisor.send(request.payload)
        return request

    def cancel(self, request: ServedRequest) -> None:
        """Cancel a request; its resources are freed after the current step."""
        if self._requests.pop(request.key, None) is not None:
            self._supervisor.send(serialize(Cancel(request.key)))
        request.is_done = True

    async def speculation(self, **changes: Any) -> dict[str, Any]:
        """Apply changes, if any, to the speculation settings and return the settings.

        Raises:
            InvalidParameterError: a change is invalid; nothing is changed.
            DraftwiseError: there is no engine.
        """
        if not self.is_ready:
            raise EngineUnavailableError("engine", "it is being started; try again later")
        call = next(self._numbers)
        payload = serialize(UpdateSpeculation(call, changes))
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[call], self._unconfirmed[call] = answer, changes
        self._supervisor.send(payload)
        try:
            return await answer
        finally:
            self._answers.pop(call, None)

    def engine_is_ready(self, ready: Ready) -> None:
        """Send the changed settings and the waiting requests to a new engine."""
        self.model = ready
        if self._changes:
            self._supervisor.send(
                serialize(UpdateSpeculation(next(self._numbers), dict(self._changes)))
            )
        for request in self._requests.values():
            self._supervisor.send(request.payload)

    def engine_reported(self, outputs: EngineOutputs) -> None:
        """Distribute outputs of the engine."""
        for key in outputs.added:
            if key in self._requests:
                self._requests[key].mark_added()
        for key, error in outputs.refused:
            request = self._requests.pop(key, None)
            if request is not None:
                request.fail(error)
        for call, described in outputs.answers:
            changes = self._unconfirmed.pop(call, {})
            if not isinstance(described, DraftwiseError):
                self._remember(changes)
            answer = self._answers.pop(call, None)
            if answer is None or answer.done():
                if isinstance(described, DraftwiseError):
                    _LOG.warning("changed speculation settings were refused: %s", described)
                continue
            if isinstance(described, DraftwiseError):
                answer.set_exception(described)
            else:
                answer.set_result(described)
        for piece in outputs.pieces:
            request = self._requests.get(piece.key)
            if request is not None:
                request.add_piece(piece)
                if request.is_done:
                    del self._requests[piece.key]
        try:
            self._on_outputs(outputs)
        except Exception:
            # Only the metrics are incomplete; the outputs have been distributed.
            _LOG.exception("outputs of the engine could not be counted")

    def _remember(self, changes: dict[str, Any]) -> None:
        """Keep changes that the engine has made, also if nobody waits for its answer any more."""
        if "policy" in changes:
            # The options of another policy do not apply to it.
            changes.setdefault("policy_options", {})
        self._changes |= changes

    def engine_was_lost(self, error: DraftwiseError) -> None:
        """Fail all requests and calls that wait for the engine."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.fail(error)
        answers, self._answers = self._answers, {}
        self._unconfirmed.clear()
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)
