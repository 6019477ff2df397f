"""A server that runs beside the test, in a thread with its own event loop."""

import asyncio
import threading
from contextlib import contextmanager

import httpx
import uvicorn

from draftwise.serving.app import create_app
from draftwise.serving.run import open_socket
from draftwise.serving.service import Service

PATIENCE_SECONDS = 120


class RunningServer:
    """Address of a server, and its service for inspection."""

    def __init__(self, service):
        self.service = service
        self._socket = open_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run, name="server")

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)
        if self._error is not None:
            self._thread.join()
            self._loop.close()
            self._socket.close()
            raise self._error
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._loop.close()
        self._socket.close()

    def client(self, **options):
        """A client of this server without timeouts."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS, **options)

    def call(self, coroutine):
        """Run a coroutine in the event loop of the server."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_SECONDS)

    def _run(self):
        self._loop.run_until_complete(self._serve())

    async def _serve(self):
        try:
            await self.service.start()
        except Exception as error:
            self._error = error
            await self.service.close()
            self._ready.set()
            return
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(self.service),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
            )
        )
        serving = asyncio.ensure_future(self._server.serve([self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving
        await self.service.close()


@contextmanager
def running(engine, settings=None):
    """Run a server with these engine settings."""
    with RunningServer(Service(engine, settings)) as server:
        yield server
