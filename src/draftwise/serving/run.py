"""Start a server, serve until told to stop, and let what runs come to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
    """A socket that listens, before minutes go into loading models.

    Raises:
        InvalidParameterError: the address cannot be had.
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
    """Load the models, then answer until SIGTERM or ctrl-C.

    After the first signal nobody new is let in, and requests that run may end; after the second,
    or when the time for that is over, they are cut off.

    Args:
        service: not started yet.
        listening: from :func:`open_socket`; closed in the end.
        on_ready: called once requests are answered.

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
                timeout_graceful_shutdown=int(settings.drain_timeout),
                server_header=False,
            ),
            on_ready,
        )
        with _hearing_once():
            await server.serve([listening])
        _LOG.info("stopped")
    finally:
        await service.close()
        listening.close()


class _Server(uvicorn.Server):
    """Says when it begins to answer."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._on_ready()


@contextlib.contextmanager
def _hearing_once() -> Iterator[None]:
    """Swallow the signal that the server raises once more when it has done what it asks."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are for the main thread alone
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
    """:func:`serve` in an event loop of its own."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(service, listening, on_ready))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The faster loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
