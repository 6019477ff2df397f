"""A thread for the tokenizer, which is not thread-safe, and the texts of single tokens."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, TypeVar

from draftwise.serving.deadline import Deadline
from draftwise.token_bytes import byte_alphabet, byte_of

Result = TypeVar("Result")
_Work = tuple[Future[Any], Callable[[], Any]]
_REPLACEMENT = "\ufffd"
_CACHED = 100_000


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


class TokenTexts:
    """Converts single tokens to text and bytes, with a cache."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a fast tokenizer; ``None`` if there is none."""
        self._tokenizer = tokenizer
        self._known = lru_cache(_CACHED)(self._look_up)

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token; a partial character has bytes but no text."""
        return self._known(token)

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            return f"token_id:{token}", []
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text, list(text.encode())
        name: str = self._tokenizer.convert_ids_to_tokens(token) or ""
        byte = byte_of(name)
        if byte is not None:
            return text, [byte]
        alphabet = byte_alphabet()
        if all(letter in alphabet for letter in name):
            return text, [alphabet[letter] for letter in name]
        return text, list(text.encode())
