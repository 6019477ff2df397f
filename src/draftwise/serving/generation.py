"""Generation of all answers to one request body: admission, progress and cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from draftwise.errors import DraftwiseError
from draftwise.outputs import FinishReason, SpeculationStats
from draftwise.params import SamplingParams
from draftwise.serving.acceptance import NONE
from draftwise.serving.admission import Admission
from draftwise.serving.client import EngineClient, RequestUpdate, ServedRequest
from draftwise.serving.deadline import Deadline
from draftwise.serving.errors import grammar_errors_named
from draftwise.serving.messages import DraftSteps, Piece
from draftwise.serving.metrics import Metrics
from draftwise.serving.tracing import Tracing, record_stats
from draftwise.speculation import RequestSpeculation


@dataclass(frozen=True)
class AnswerSpec:
    """Specification of one answer.

    Attributes:
        prompt: text of the prompt; ``None`` if token ids were given.
        prompt_ids: token ids of the prompt.
        params: sampling parameters.
        is_first: whether it is the first of the answers to its prompt.
    """

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    is_first: bool = True


@dataclass
class Progress:
    """Progress of one answer.

    Attributes:
        num_tokens: number of tokens generated so far.
        last_token_time: monotonic time of the last tokens, in seconds; ``None`` before the first.
        finish_reason: why the answer ended; ``None`` while it is generated.
        stats: counts of speculative decoding, set at the end.
        num_cached_tokens: prompt tokens that were found in the prefix cache, set at the end.
        drafts: counts of each draft, set at the end if the engine has drafts.
    """

    num_tokens: int = 0
    last_token_time: float | None = None
    finish_reason: FinishReason | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_cached_tokens: int = 0
    drafts: DraftSteps | None = None


class Generation:
    """All answers to one request body, as an asynchronous context manager.

    Entering the context submits the requests to the engine. Leaving it cancels unfinished requests.

    Attributes:
        specs: specification of each answer.
        progress: progress of each answer.
        deadline: when the last token must be generated.
        spec_decode_metrics: how much of the acceptance is reported.
    """

    def __init__(
        self,
        client: EngineClient,
        admission: Admission,
        metrics: Metrics,
        specs: Sequence[AnswerSpec],
        speculation: RequestSpeculation,
        deadline: Deadline,
        tracing: Tracing,
        model: str,
        grammar_field: str | None = None,
        spec_decode_metrics: str = NONE,
    ) -> None:
        """Create the generation; no request is submitted yet.

        Args:
            client: client of the engine.
            admission: limits the number of requests.
            metrics: metrics for latencies of requests.
            specs: specification of each answer.
            speculation: speculation settings of all answers.
            deadline: when the last token must be generated.
            tracing: creates the span of the generation.
            model: name of the model in the span.
            grammar_field: field of the body that defines the grammar, for error messages; ``None``
                for ``structured_outputs``.
            spec_decode_metrics: how much of the acceptance is reported; see
                :attr:`ServerSettings.per_request_spec_decode_metrics`.
        """
        self.specs, self.spec_decode_metrics = specs, spec_decode_metrics
        self.progress = [Progress() for _ in specs]
        self._client, self._admission, self._metrics = client, admission, metrics
        self._speculation, self._grammar_field = speculation, grammar_field
        self.deadline = deadline
        self._tracing, self._model = tracing, model
        self._first_token_seconds: float | None = None
        self._updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()
        self._requests: list[ServedRequest] = []
        self._error: DraftwiseError | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts; a prompt with several answers counts once."""
        return sum(len(each.prompt_ids) for each in self.specs if each.is_first)

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens of all prompts that were found in the prefix cache."""
        both = zip(self.specs, self.progress, strict=True)
        return sum(progress.num_cached_tokens for spec, progress in both if spec.is_first)

    async def __aenter__(self) -> Self:
        """Submit the requests and wait until the engine has accepted them.

        Raises:
            DraftwiseError: the engine rejects a request, or the queue is full.
        """
        self._span = self._tracing.begin(self._model, self.num_prompt_tokens, len(self.specs))
        try:
            self._admission.enter(len(self.specs))
        except DraftwiseError as error:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.end()
            raise
        try:
            for number, each in enumerate(self.specs):
                self._requests.append(
                    self._client.submit(
                        each.prompt,
                        each.prompt_ids,
                        each.params,
                        self._speculation,
                        number,
                        self._updates,
                    )
                )
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.deadline.seconds_left, self._time_out)
            for request in self._requests:
                await request.added()
        except BaseException as error:
            self._end(error)
            with grammar_errors_named(self._grammar_field):
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
        """Yield pieces of answers with the indices of the answers, until all answers have ended.

        Raises:
            DraftwiseError: an answer failed, or the request timed out.
        """
        num_unfinished = len(self.specs)
        while num_unfinished:
            number, update = await self._updates.get()
            if isinstance(update, DraftwiseError):
                self._error = update
                raise update
            self._observe(self.progress[number], update)
            num_unfinished -= update.finish_reason is not None
            yield number, update

    def _observe(self, progress: Progress, piece: Piece) -> None:
        now = time.monotonic()
        if piece.token_ids:
            if progress.last_token_time is None:
                seconds = now - self.deadline.arrived
                self._metrics.first_token(seconds)
                if self._first_token_seconds is None:
                    self._first_token_seconds = seconds
            else:
                self._metrics.next_tokens(now - progress.last_token_time)
            progress.last_token_time = now
        progress.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            progress.finish_reason = piece.finish_reason
            assert piece.stats is not None
            progress.stats = piece.stats
            progress.num_cached_tokens = piece.num_cached_tokens
            progress.drafts = piece.drafts

    def _time_out(self) -> None:
        error = self.deadline.exceeded("the answer was not complete")
        for request in self._requests:
            if not request.is_done:
                self._client.cancel(request)
                request.fail(error)

    def _end(self, error: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            if not request.is_done:
                self._client.cancel(request)
        total = SpeculationStats()
        for progress in self.progress:
            total.add(progress.stats)
        if error is not None or self._error is not None:
            self._span.set_attribute("error.type", type(self._error or error).__name__)
        record_stats(self._span, total, self._first_token_seconds)
        self._span.end()
        for progress in self.progress:
            self._admission.leave()
            reason = progress.finish_reason
            if reason is None:
                failed = self._error is not None or isinstance(error, DraftwiseError)
                reason = FinishReason.ERROR if failed else FinishReason.CANCELLED
            self._metrics.ended(reason, self.deadline.seconds, progress.num_tokens)
