"""One thread for the tokenizer, which two threads must not use at once."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from draftwise.serving.errors import DeadlineExceededError

Result = TypeVar("Result")
_Work = tuple[Future[Any], Callable[[], Any]]


class TokenizerThread:
    """Runs functions one after the other.

    It is a daemon: one that hangs does not keep the server from stopping.
    """

    def __init__(self, timeout: float) -> None:
        """Start it.

        Args:
            timeout: seconds after which a caller gives up.
        """
        self._timeout = timeout
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._started: float | None = None
        self._thread = threading.Thread(target=self._run, name="draftwise-tokenize", daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """For how long the present function has been running; 0 while there is none."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started

    @property
    def is_alive(self) -> bool:
        """Whether functions are run."""
        return self._thread.is_alive()

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of a function, called in the thread.

        Raises:
            DeadlineExceededError: there is none in time.
        """
        future: Future[Result] = Future()
        self._work.put((future, work))
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise DeadlineExceededError(
                "request_timeout", f"the prompt was not tokenized in {self._timeout:g} seconds"
            ) from None

    def close(self) -> None:
        """End it once the present function returns."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, function = work
            if not future.set_running_or_notify_cancel():
                continue
            self._started = time.monotonic()
            try:
                result = function()
            except BaseException as error:
                self._started = None
                future.set_exception(error)
            else:
                self._started = None
                future.set_result(result)
