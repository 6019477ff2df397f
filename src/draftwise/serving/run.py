"""Startup and graceful shutdown of a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from draftwise.errors import InvalidParameterError
from draftwise.serving.app import create_app
from draftwise.serving.service import Service

_LOG = logging.getLogger("draftwise.serving")
_BACKLOG = 2048


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; called before the models are loaded, which can take minutes.

    Raises:
        InvalidParameterError: the address is not available.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise InvalidParameterError(
            "port", f"cannot listen at {host!r}, port {port}: {error}"
        ) from error


async def serve(
    service: Service, listening: socket.socket, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Load the models, then serve until SIGTERM or ctrl-C.

    After the first signal no new requests are accepted, and running requests may finish. After a
    second signal, or when the drain timeout has passed, running requests are aborted.

    Args:
        service: the service, not started yet.
        listening: socket from :func:`open_socket`; closed at the end.
        on_ready: called when the server accepts requests.

    Raises:
        DraftwiseError: the models cannot be loaded.
    """
    settings = service.settings
    try:
        await service.start()
        server = _Server(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=math.ceil(settings.drain_timeout),
                server_header=False,
            ),
            on_ready,
        )
        with _ignoring_reraised_signals():
            await server.serve([listening])
        _LOG.info("stopped")
    finally:
        await service.close()
        listening.close()


class _Server(uvicorn.Server):
    """A server that calls a function after its startup."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests."""
        await super().startup(sockets)
        self._on_ready()


@contextlib.contextmanager
def _ignoring_reraised_signals() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after its graceful shutdown."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    before = [(each, signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT)]
    try:
        for each, _ in before:
            signal.signal(each, lambda *_: None)
        yield
    finally:
        for each, handler in before:
            signal.signal(each, handler)


def run(service: Service, listening: socket.socket, on_ready: Callable[[], None]) -> None:
    """Run :func:`serve` in a new event loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(service, listening, on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of uvloop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
