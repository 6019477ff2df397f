"""A thread for the tokenizer, which is not thread-safe."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from draftwise.serving.deadline import Deadline

Result = TypeVar("Result")
_Work = tuple[Future[Any], Callable[[], Any]]


class TokenizerThread:
    """Runs functions one after another in a thread.

    It is a daemon thread, so that a function that hangs does not prevent the shutdown.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._started: float | None = None
        self._thread = threading.Thread(target=self._run, name="draftwise-tokenize", daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start of the running function; 0 if none is running."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    async def run(self, work: Callable[[], Result], deadline: Deadline) -> Result:
        """Call a function in the thread and return its result.

        Args:
            work: the function.
            deadline: when the call fails.

        Raises:
            DeadlineExceededError: the function did not return before the deadline.
        """
        future: Future[Result] = Future()
        self._work.put((future, work))
        try:
            async with asyncio.timeout(deadline.seconds_left):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise deadline.exceeded("the prompt was not tokenized") from None

    def close(self) -> None:
        """End the thread after the running function returns."""
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
