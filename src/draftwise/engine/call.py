"""The requests of one caller. Several callers may use an engine from different threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from draftwise.engine.engine import Engine
from draftwise.engine.request import Request

Seen = TypeVar("Seen")


class Call:
    """Steps an engine until the requests of one caller have ended.

    Steps of other callers advance these requests too. So this caller only steps the engine when
    none of its requests has changed since it last looked.
    """

    def __init__(self, engine: Engine) -> None:
        """Start without requests."""
        self._engine = engine
        self._seen: dict[Request, int] = {}

    def add(self, request: Request) -> None:
        """Track a request that was added to the engine."""
        self._seen[request] = request.num_output_tokens

    @property
    def is_over(self) -> bool:
        """Whether every request has ended and the caller has seen it."""
        return not self._seen

    def finish(self) -> None:
        """Step the engine until all requests have ended."""
        if self.is_over:
            return
        engine, turns = self._engine, self._engine.turns
        running, depth = list(self._seen), self._engine.turns.depth

        def have_ended() -> bool:
            while running and running[-1].finish_reason is not None:
                running.pop()
            return not running

        try:
            turns.acquire(engine, have_ended)
            while not have_ended():
                engine.step()
                turns.pass_on(engine, have_ended)
            turns.release()
        except BaseException:
            turns.unwind(depth)
            raise
        self._seen.clear()

    def advance(self, look: Callable[[Request], Seen]) -> list[Seen]:
        """Step the engine once, unless a request has changed already.

        Args:
            look: called with each request that gained tokens or ended since the last call. Requests
                do not change during these calls.

        Returns:
            The results of ``look``, one for each changed request.
        """
        turns = self._engine.turns
        depth = turns.depth
        try:
            turns.acquire(self._engine, self._has_news)
            if not self._has_news():
                self._engine.step()
            seen = [look(request) for request in self._take_news()]
            turns.release()
        except BaseException:
            turns.unwind(depth)
            raise
        return seen

    def cancel(self) -> None:
        """End the requests before the next step. Safe in a finaliser and during a step."""
        if self._seen:
            self._engine.cancel_soon(list(self._seen))
            self._seen.clear()

    def _has_news(self) -> bool:
        return any(_is_new(request, seen) for request, seen in self._seen.items())

    def _take_news(self) -> list[Request]:
        news = [request for request, seen in self._seen.items() if _is_new(request, seen)]
        for request in news:
            if request.finish_reason is None:
                self._seen[request] = request.num_output_tokens
            else:
                del self._seen[request]
        return news


def _is_new(request: Request, seen: int) -> bool:
    return request.num_output_tokens != seen or request.finish_reason is not None
