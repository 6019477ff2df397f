"""All answers to one body: let in, followed to their ends, cancelled if nobody waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeGuard

from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.outputs import FinishReason, SpeculationStats
from draftwise.params import RequestSpeculation, SamplingParams
from draftwise.serving.admission import Admission
from draftwise.serving.client import EngineClient
from draftwise.serving.errors import DeadlineExceededError, OverloadedError
from draftwise.serving.messages import Piece
from draftwise.serving.metrics import RequestMetrics
from draftwise.serving.requests import News, ServedRequest
from draftwise.serving.tracing import Tracing, tell


@dataclass(frozen=True)
class Question:
    """One answer that is asked for.

    Attributes:
        prompt: text of the prompt, ``None`` if tokens were given.
        prompt_ids: its tokens.
        params: how to draw.
        is_first: of the answers to its prompt.
    """

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    is_first: bool = True


@dataclass
class Progress:
    """How far an answer is.

    Attributes:
        num_tokens: so far.
        last_news: monotonic time of its last piece, in seconds; ``None`` before the first.
        finish_reason: why it ended, once it has.
        stats: how speculation went, once it has ended.
    """

    num_tokens: int = 0
    last_news: float | None = None
    finish_reason: FinishReason | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class Generation:
    """The answers to one body, as an asynchronous context.

    Inside it all requests are in the engine; whatever still runs when it is left is cancelled.

    Attributes:
        questions: one for each answer.
        progress: of each answer.
    """

    def __init__(
        self,
        client: EngineClient,
        admission: Admission,
        metrics: RequestMetrics,
        questions: Sequence[Question],
        speculation: RequestSpeculation,
        timeout: float,
        tracing: Tracing,
        model: str,
        form_field: str | None = None,
    ) -> None:
        """Set up; nothing is asked for yet.

        Args:
            client: of the engine.
            admission: decides who may wait.
            metrics: is told how long everything takes.
            questions: one for each answer.
            speculation: how to speculate.
            timeout: seconds from now to the last token.
            tracing: is told how it went.
            model: its name there.
            form_field: of the body, that says what form the answers have; errors of the form name
                it. ``None`` for ``structured_outputs``.
        """
        self.questions = questions
        self.progress = [Progress() for _ in questions]
        self._client, self._admission, self._metrics = client, admission, metrics
        self._speculation, self._form_field = speculation, form_field
        self._arrived = time.monotonic()
        self._timeout = timeout
        self._span = tracing.begin(model, self.num_prompt_tokens, len(questions))
        self._first_token_seconds: float | None = None
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._requests: list[ServedRequest] = []
        self._error: DraftwiseError | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts; one that several answers share counts once."""
        return sum(len(each.prompt_ids) for each in self.questions if each.is_first)

    async def __aenter__(self) -> Self:
        """Let the requests in and wait until the engine has them.

        Raises:
            DraftwiseError: the engine does not take one, or there is no room.
        """
        try:
            self._admission.enter(len(self.questions))
        except OverloadedError as error:
            self._metrics.refused("queue")
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.end()
            raise
        try:
            for number, each in enumerate(self.questions):
                self._requests.append(
                    self._client.submit(
                        each.prompt,
                        each.prompt_ids,
                        each.params,
                        self._speculation,
                        number,
                        self._news,
                    )
                )
            self._alarm = asyncio.get_running_loop().call_later(self.seconds_left, self._time_is_up)
            for request in self._requests:
                await request.added()
        except BaseException as error:
            self._end(error)
            if self._form_field is not None and _is_about_form(error):
                raise InvalidParameterError(self._form_field, error.message) from error
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """What the answers gain, with their numbers, until all have ended.

        Raises:
            DraftwiseError: one failed, or time is up.
        """
        left = len(self.questions)
        while left:
            number, news = await self._news.get()
            if isinstance(news, DraftwiseError):
                self._error = news
                raise news
            self._take(self.progress[number], news)
            left -= news.finish_reason is not None
            yield number, news

    def _take(self, progress: Progress, piece: Piece) -> None:
        now = time.monotonic()
        if piece.token_ids:
            if progress.last_news is None:
                self._metrics.first_token(now - self._arrived)
                if self._first_token_seconds is None:
                    self._first_token_seconds = now - self._arrived
            else:
                self._metrics.next_tokens(now - progress.last_news)
            progress.last_news = now
        progress.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            progress.finish_reason = piece.finish_reason
            assert piece.stats is not None
            progress.stats = piece.stats

    @property
    def seconds_left(self) -> float:
        """Until time is up."""
        return max(0.0, self._arrived + self._timeout - time.monotonic())

    def _time_is_up(self) -> None:
        error = DeadlineExceededError(
            "request_timeout", f"the answer was not complete after {self._timeout:g} seconds"
        )
        for request in self._requests:
            if not request.is_done:
                self._client.cancel(request)
                request.failed(error)

    def _end(self, error: BaseException | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for request in self._requests:
            if not request.is_done:
                self._client.cancel(request)
        total = SpeculationStats()
        for progress in self.progress:
            total.add(progress.stats)
        if error is not None or self._error is not None:
            self._span.set_attribute("error.type", type(self._error or error).__name__)
        tell(self._span, total, self._first_token_seconds)
        self._span.end()
        for progress in self.progress:
            self._admission.leave()
            reason = progress.finish_reason
            if reason is None:
                failed = self._error is not None or isinstance(error, DraftwiseError)
                reason = FinishReason.ERROR if failed else FinishReason.CANCELLED
            self._metrics.ended(reason, time.monotonic() - self._arrived, progress.num_tokens)


def _is_about_form(error: BaseException) -> TypeGuard[InvalidParameterError]:
    """Whether an error is about the form that an answer must have."""
    return isinstance(error, InvalidParameterError) and error.field.startswith("structured_outputs")
