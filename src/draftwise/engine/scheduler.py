"""Who takes part in a step, and what becomes of them afterwards."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

from draftwise.core.random import step_uniforms
from draftwise.core.sampling import LogitControls
from draftwise.core.types import Outcome, Plan
from draftwise.engine.batch import Batch, PromptChunk
from draftwise.engine.controls import HistoryStore, batch_controls
from draftwise.engine.request import NO_ROW, Request
from draftwise.errors import (
    CacheExhaustedError,
    DraftwiseError,
    EngineError,
    NumericalError,
)
from draftwise.models.kv_cache import KVCache
from draftwise.outputs import FinishReason, TokenLogprobs, TokenSource


class Scheduler:
    """Admits requests to cache rows in order of arrival and retires them.

    A request is admitted when a row is free and the memory it may need at most is unreserved, so
    that a running request never runs out of cache.

    Attributes:
        max_draft_length: longest draft of any step; may be changed between steps.
        max_cached_tokens: tokens that may be reserved at once.
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        histories: HistoryStore,
        vocab_size: int,
        max_chunk_tokens: int,
        max_draft_length: int,
        max_cached_tokens: int,
    ) -> None:
        """Set up.

        Args:
            caches: the target's cache first, then those that follow it.
            histories: token histories by row.
            vocab_size: of the target.
            max_chunk_tokens: prompt tokens per step over all requests.
            max_draft_length: longest draft of any step.
            max_cached_tokens: tokens that may be reserved at once.
        """
        self._caches: Sequence[KVCache] = caches
        self._histories = histories
        self._vocab_size = vocab_size
        self._max_chunk_tokens = max_chunk_tokens
        self.max_draft_length = max_draft_length
        self.max_cached_tokens = max_cached_tokens
        self._reserved_tokens = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._free_rows = list(range(caches[0].num_rows))
        self._controls: dict[int | None, tuple[tuple[int, ...], LogitControls]] = {}
        self._changing: Request | None = None
        # Lengths of the followers' caches before the step of each row.
        self._before = [[0] * cache.num_rows for cache in caches[1:]]

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    @property
    def num_reserved_tokens(self) -> int:
        """Cache tokens promised to running requests."""
        return self._reserved_tokens

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheExhaustedError: it could never be admitted.
        """
        if request.max_total_tokens > self.max_cached_tokens:
            raise CacheExhaustedError(
                "max_tokens",
                f"the request may need {request.max_total_tokens} tokens of cache and there are "
                f"{self.max_cached_tokens} in all; shorten it or give the cache more memory",
            )
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request wherever it is."""
        self.end(request, FinishReason.CANCELLED)

    def end(
        self, request: Request, reason: FinishReason, error: DraftwiseError | None = None
    ) -> None:
        """End a request wherever it is, unless it has ended."""
        if request.finish_reason is None:
            self._changing = request
            request.finish(reason, error)
            self._retire(request)
            self._changing = None

    def end_all(self, error: DraftwiseError) -> None:
        """End all requests with an error."""
        for request in [*self._running.values(), *self._waiting]:
            self.end(request, FinishReason.ERROR, error)

    def recover(self) -> None:
        """Return to the state between two steps, after an exception at any place of one.

        What the caches hold beyond a request's tokens is forgotten. Only a request whose own state
        was being changed ends with an error.
        """
        broken, self._changing = self._changing, None
        if broken is not None and broken.finish_reason is None:
            broken.finish(
                FinishReason.ERROR, EngineError("engine", "a step was interrupted; send it again")
            )
        running = {}
        for row, request in self._running.items():
            if request.finish_reason is not None:
                request.row = NO_ROW
                continue
            running[row], request.row = request, row
            valid = len(request.tokens) - 1
            target_cache, *followers = self._caches
            target_cache.truncate(row, valid)
            for cache, before in zip(followers, self._before, strict=True):
                cache.truncate(row, min(valid, before[row]))
        admitted = set(running.values())
        self._running = running
        self._waiting = deque(
            r for r in self._waiting if r not in admitted and r.finish_reason is None
        )
        self._free_rows = sorted(set(range(self._caches[0].num_rows)) - running.keys())
        self._reserved_tokens = sum(r.max_total_tokens for r in running.values())
        self._controls.clear()

    def close(self) -> None:
        """Let go of the caches; no request is left."""
        self._caches, self._before = (), []
        self._controls.clear()
        self._histories.close()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row, or will have one in the next step."""
        return min(self.num_unfinished, self._caches[0].num_rows)

    def next_batch(self, lenience: float = 1.0, half: int | None = None) -> Batch:
        """Admit who fits and decide what each request does in this step.

        Args:
            lenience: of requests that have none of their own.
            half: 0 or 1 for the requests of one half of the rows, ``None`` for all; a half may
                have nothing to do.
        """
        self._admit()
        self._remember_lengths(half)
        running = [self._running[row] for row in sorted(self._running)]
        if half is not None:
            running = [request for request in running if request.row % 2 == half]
        chunks = self._prompt_chunks(running)
        completing = {chunk.request.row for chunk in chunks if chunk.completes_prompt}
        decoding = {r.row for r in running if self._num_pending(r) == 1 and r.num_output_tokens}
        generating = [r for r in running if r.row in completing or r.row in decoding]
        if half is None and self.num_unfinished and not (chunks or generating):
            # Every caller loops until all are finished: better to stop than to spin.
            raise RuntimeError("requests are unfinished and none of them can advance")
        controls = self._batch_controls(generating, half)
        return Batch(
            chunks=chunks,
            generating=generating,
            can_draft=[r.row in decoding for r in generating],
            controls=controls,
            history=self._histories.rows([r.row for r in generating])
            if controls.uses_history
            else None,
            uniforms=None
            if controls.all_greedy
            else step_uniforms(
                [r.seed for r in generating],
                [len(r.tokens) for r in generating],
                self.max_draft_length,
            ),
            lenience=[
                lenience if r.speculation.lenience is None else r.speculation.lenience
                for r in generating
            ],
        )

    def commit(
        self,
        batch: Batch,
        plan: Plan,
        outcome: Outcome,
        logprobs: Mapping[int, Sequence[TokenLogprobs]],
    ) -> list[Request]:
        """Append what was accepted, roll the caches back, retire who is done.

        Args:
            batch: the step.
            plan: what was verified.
            outcome: what the target made of it.
            logprobs: for each accepted token and the one after them, by index of the requests that
                ask for them.

        Returns:
            The requests that gained tokens or ended.
        """
        planned = plan.tokens.tolist()
        acceptance = [] if outcome.acceptance is None else outcome.acceptance.tolist()
        for index, request in enumerate(batch.generating):
            self._changing = request
            if index in outcome.failed:
                request.finish(
                    FinishReason.ERROR,
                    NumericalError("target", "its logits for this request are not numbers"),
                )
            else:
                length = outcome.num_verified[index]
                request.history.learn(acceptance[index][:length])
                num_own = length if plan.num_own is None else plan.num_own[index]
                self._append(request, index, planned[index], outcome, num_own, logprobs.get(index))
            if request.finish_reason is not None:
                self._retire(request)
            self._changing = None
        return batch.generating

    def _append(
        self,
        request: Request,
        index: int,
        planned: list[int],
        outcome: Outcome,
        num_own: int,
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> None:
        verified, accepted = outcome.num_verified[index], outcome.num_accepted[index]
        start = len(request.tokens)
        stats = request.stats
        stats.num_steps += 1
        stats.num_drafted += outcome.num_drafted[index]
        stats.num_verified += verified
        stats.num_accepted += accepted
        last = TokenSource.BONUS if accepted == verified else TokenSource.CORRECTION
        if not verified:
            last = TokenSource.TARGET
        tokens = [*planned[:accepted], outcome.next_tokens[index]]
        for place, token in enumerate(tokens):
            source = TokenSource.DRAFT if place < accepted else last
            if request.append(token, source, None if logprobs is None else logprobs[place]):
                break
        # The newest token was never an input; whatever lies beyond it was rejected. Beyond what
        # the draft itself wrote, the small models have read other tokens than the target.
        valid = len(request.tokens) - 1
        target_cache, *followers = self._caches
        target_cache.truncate(request.row, valid)
        for cache in followers:
            cache.truncate(request.row, min(valid, start + num_own))
        if request.params.uses_penalties and len(request.tokens) > start:
            self._histories.append(request.row, request.tokens[start:])

    def _num_pending(self, request: Request) -> int:
        """Tokens that the target has not processed yet."""
        return len(request.tokens) - self._caches[0].lengths[request.row]

    def _admit(self) -> None:
        while self._waiting and self._free_rows:
            request = self._waiting[0]
            if self._reserved_tokens + request.max_total_tokens > self.max_cached_tokens:
                return
            row = self._free_rows[0]
            for cache in self._caches:
                cache.clear(row)
            if request.params.uses_penalties:
                self._histories.begin(row, request.tokens)
            # A request that is interrupted here is in one of the two, or in both.
            self._running[row] = request
            request.row = row
            self._waiting.popleft()
            heapq.heappop(self._free_rows)
            self._reserved_tokens += request.max_total_tokens

    def _remember_lengths(self, half: int | None) -> None:
        """What the followers have read of texts, before a step lets them read drafts."""
        rows = slice(None) if half is None else slice(half, None, 2)
        for before, cache in zip(self._before, self._caches[1:], strict=True):
            before[rows] = cache.lengths[rows]

    def _prompt_chunks(self, running: list[Request]) -> list[PromptChunk]:
        """Share the step's prompt tokens out in order of arrival; the result is by row."""
        chunks: list[PromptChunk] = []
        left = self._max_chunk_tokens
        for request in sorted(running, key=lambda r: r.request_id):
            if request.num_output_tokens or left == 0:
                continue
            start = self._caches[0].lengths[request.row]
            end = min(len(request.tokens), start + left)
            chunks.append(PromptChunk(request, start, end))
            left -= end - start
        return sorted(chunks, key=lambda chunk: chunk.request.row)

    def _batch_controls(self, generating: list[Request], half: int | None) -> LogitControls:
        """The batch's controls, rebuilt only when its members change."""
        members = tuple(request.request_id for request in generating)
        known = self._controls.get(half)
        if known is not None and known[0] == members:
            return known[1]
        controls = batch_controls(
            [request.params for request in generating],
            self._vocab_size,
            self._histories.device,
        )
        self._controls[half] = members, controls
        return controls

    def _retire(self, request: Request) -> None:
        if request.row == NO_ROW:
            self._waiting.remove(request)
            return
        del self._running[request.row]
        heapq.heappush(self._free_rows, request.row)
        self._reserved_tokens -= request.max_total_tokens
        request.row = NO_ROW
