"""The requests of one caller, who may be one of many in threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from draftwise.engine.engine import Engine
from draftwise.engine.request import Request

Seen = TypeVar("Seen")


class Call:
    """Steps an engine until the requests of one caller have ended.

    Steps of other callers advance them as well: one is taken only where there is no news yet.
    """

    def __init__(self, engine: Engine) -> None:
        """Begin without requests.

        Args:
            engine: the engine.
        """
        self._engine = engine
        self._seen: dict[Request, int] = {}

    def add(self, request: Request) -> None:
        """Take a request in that the engine has."""
        self._seen[request] = request.num_output_tokens

    @property
    def is_over(self) -> bool:
        """Whether the end of every request has been seen."""
        return not self._seen

    def finish(self) -> None:
        """Step until all requests have ended."""
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
        """Step once, unless there is news already.

        Args:
            look: at a request with news: it gained tokens or ended since it was last looked at.
                Nothing changes meanwhile.

        Returns:
            What was seen of each request with news.
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
        """End the requests, soon. Safe in a finaliser, and inside of a step."""
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
