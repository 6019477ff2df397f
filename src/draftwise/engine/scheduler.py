"""Selects the requests of each step and updates them after it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from draftwise.core.sampling import LogitControls
from draftwise.core.types import Outcome, Plan
from draftwise.engine.batch import Batch, HistoryStore, PromptChunk, batch_controls
from draftwise.engine.lifecycle import Commit, FollowsRequests, StateRows
from draftwise.engine.prefix_cache import PrefixCache
from draftwise.engine.request import NO_CACHE_SLOT, Request
from draftwise.errors import (
    CacheExhaustedError,
    DraftwiseError,
    EngineError,
    NumericalError,
)
from draftwise.kernels.native.sampling import step_uniforms
from draftwise.models.kv_cache import KVCache
from draftwise.outputs import FinishReason, TokenLogprobs, TokenSource

# Batches whose sampling parameters are cached: two, because halves of all requests may alternate.
_KEPT_CONTROLS = 2
# Steps without a new request among running ones after which no other is expected.
_STEPS_TO_CLOSE = 256


class Scheduler:
    """Admits requests to cache slots in order of arrival and retires them.

    A request is admitted when a slot is free and the cache has room for its maximum length. So a
    running request never runs out of cache. The scheduler keeps the target's cache. It notifies its
    ``followers`` when requests join, gain tokens and end.

    Attributes:
        max_draft_length: maximum draft length of any step; may be changed between steps.
        max_cached_tokens: maximum number of cache tokens reserved at once.
    """

    def __init__(
        self,
        target_cache: KVCache,
        followers: Sequence[FollowsRequests],
        histories: HistoryStore,
        vocab_size: int,
        max_chunk_tokens: int,
        max_draft_length: int,
        max_cached_tokens: int,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """Set up.

        Args:
            target_cache: the target's key-value cache.
            followers: components that keep state for each request.
            histories: token histories by cache slot.
            vocab_size: the target's vocabulary size.
            max_chunk_tokens: maximum number of prompt tokens per step over all requests.
            max_draft_length: maximum draft length of any step.
            max_cached_tokens: maximum number of cache tokens reserved at once.
            prefixes: stores prefixes that requests share; ``None`` for no prefix caching.
        """
        self._target_cache = target_cache
        self._prefixes = prefixes
        self._followers = followers
        self._histories = histories
        self._vocab_size = vocab_size
        self._max_chunk_tokens = max_chunk_tokens
        self.max_draft_length = max_draft_length
        self.max_cached_tokens = max_cached_tokens
        self._reserved_tokens = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._free_slots = list(range(target_cache.num_cache_slots))
        self._controls: dict[tuple[int, ...], LogitControls] = {}
        self._changing: Request | None = None
        self._steps_since_joining = _STEPS_TO_CLOSE

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self._waiting) + len(self._running)

    @property
    def num_reserved_tokens(self) -> int:
        """Number of cache tokens reserved for running requests."""
        return self._reserved_tokens

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CacheExhaustedError: the request could never be admitted.
        """
        if request.max_total_tokens > self.max_cached_tokens:
            raise CacheExhaustedError(
                "max_tokens",
                f"the request may need {request.max_total_tokens} tokens of cache and there are "
                f"{self.max_cached_tokens} in all; shorten it or give the cache more memory",
            )
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a waiting or running request."""
        self.end(request, FinishReason.CANCELLED)

    def end(
        self, request: Request, reason: FinishReason, error: DraftwiseError | None = None
    ) -> None:
        """End a waiting or running request; does nothing if it has ended."""
        if request.finish_reason is None:
            self._changing = request
            request.finish(reason, error)
            self._retire(request)
            self._changing = None

    def end_all(self, error: DraftwiseError) -> None:
        """End all requests with an error."""
        for request in self.unfinished:
            self.end(request, FinishReason.ERROR, error)

    def recover(self) -> None:
        """Return to the state between two steps after an exception anywhere in a step.

        Cache entries beyond a request's tokens are discarded. Only a request whose own state was
        being changed ends with an error.
        """
        interrupted, self._changing = self._changing, None
        if interrupted is not None and interrupted.finish_reason is None:
            interrupted.finish(
                FinishReason.ERROR, EngineError("engine", "a step was interrupted; send it again")
            )
        running = {}
        for row, request in self._running.items():
            if request.finish_reason is not None:
                self._leave_slot(request)
                continue
            running[row], request.cache_slot = request, row
            # It is cleared if a recurrent state has advanced.
            self._target_cache.roll_back(row, self._num_kept(request))
        admitted = set(running.values())
        for request in self._waiting:
            if request not in admitted:
                self._leave_slot(request)
        self._running = running
        self._waiting = deque(
            r for r in self._waiting if r not in admitted and r.finish_reason is None
        )
        self._free_slots = sorted(set(range(self._target_cache.num_cache_slots)) - running.keys())
        self._reserved_tokens = sum(r.max_total_tokens for r in running.values())
        self._controls.clear()
        for follower in self._followers:
            follower.recover(running.values())

    @staticmethod
    def _num_kept(request: Request) -> int:
        """Maximum number of tokens that stay in the target's cache after an exception.

        The newest token is not in it between two steps. Prompt tokens without the log-probabilities
        that were asked for are read again.
        """
        num_reviewed = len(request.prompt_logprobs)
        wants_more = num_reviewed < request.num_prompt_tokens - 1
        if request.params.prompt_logprobs is not None and wants_more:
            return num_reviewed
        return len(request.tokens) - 1

    def close(self) -> None:
        """Release the caches. All requests must have ended."""
        del self._target_cache
        self._prefixes = None
        self._followers = ()
        self._controls.clear()

    @property
    def unfinished(self) -> list[Request]:
        """The running and the waiting requests."""
        return [*self._running.values(), *self._waiting]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a cache slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that have a cache slot, or get one as soon as there is memory."""
        return min(self.num_unfinished, self._target_cache.num_cache_slots)

    def next_batch(
        self, lenience: float = 1.0, only: Callable[[Request], bool] | None = None
    ) -> Batch:
        """Admit waiting requests that fit, and build the batch of this step.

        Args:
            lenience: lenience of requests that set none.
            only: restricts the step to these requests. The batch may then be empty.
        """
        self._admit()
        running = [self._running[row] for row in sorted(self._running)]
        if only is not None:
            running = [request for request in running if only(request)]
        chunks = self._prompt_chunks(running)
        completing = {chunk.request.cache_slot for chunk in chunks if chunk.completes_prompt}
        decoding = {
            r.cache_slot for r in running if self._num_pending(r) == 1 and r.num_output_tokens
        }
        generating = [r for r in running if r.cache_slot in completing or r.cache_slot in decoding]
        if only is None and self.num_unfinished and not (chunks or generating):
            # Callers loop until all requests are finished, so an error is better than an endless
            # loop.
            raise RuntimeError("requests are unfinished and none of them can advance")
        controls = self._batch_controls(generating)
        return Batch(
            chunks=chunks,
            generating=generating,
            can_draft=[r.cache_slot in decoding for r in generating],
            controls=controls,
            token_history=self._histories.rows([r.cache_slot for r in generating])
            if controls.uses_token_history
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
            is_closed=not self._waiting and self._steps_since_joining >= _STEPS_TO_CLOSE,
        )

    def commit(
        self,
        batch: Batch,
        plan: Plan,
        outcome: Outcome,
        logprobs: Mapping[int, Sequence[TokenLogprobs]],
        states: Mapping[int, StateRows] | None = None,
    ) -> list[Request]:
        """Append accepted tokens, roll the caches back and retire finished requests.

        Args:
            batch: the step.
            plan: what was verified.
            outcome: the acceptance decisions.
            logprobs: log-probabilities of the accepted tokens and of the token after them, by
                request index, for the requests that want them.
            states: by cache slot, hidden states of all tokens that the target read; ``None`` if the
                proposer reads none.

        Returns:
            The requests that gained tokens or ended.
        """
        planned = plan.host_tokens
        acceptance = [] if outcome.acceptance is None else outcome.acceptance.tolist()
        num_own = outcome.num_verified if plan.num_own is None else plan.num_own
        committed = self._commit_of(batch, num_own)
        for index, request in enumerate(batch.generating):
            self._changing = request
            if index in outcome.failed:
                request.finish(
                    FinishReason.ERROR,
                    NumericalError("target", "its logits for this request are not numbers"),
                )
            else:
                is_copied = outcome.is_copied is not None and outcome.is_copied[index]
                if not is_copied and outcome.paths is None:
                    # The history is about the tokens of chains that a draft model wrote.
                    request.history.learn(acceptance[index][: outcome.num_verified[index]])
                self._append(request, index, planned[index], outcome, logprobs.get(index))
            self._changing = None
        if states is not None:
            committed = replace(
                committed, states=[self._kept_states(r, states) for r in committed.requests]
            )
        for follower in self._followers:
            follower.commit(committed)
        if self._prefixes is not None:
            for request in committed.requests:
                # What a request with NaN logits has computed may be NaN, too.
                if request.finish_reason is not FinishReason.ERROR:
                    self._prefixes.store(request, request.finish_reason is not None)
        for request in batch.generating:
            if request.finish_reason is not None:
                self._retire(request)
        return batch.generating

    @staticmethod
    def _commit_of(batch: Batch, num_own: Sequence[int]) -> Commit:
        """Record the requests' state before the commit changes it."""
        gaining = {request.request_id for request in batch.generating}
        reading = [chunk.request for chunk in batch.chunks]
        reading = [request for request in reading if request.request_id not in gaining]
        requests = [*batch.generating, *reading]
        return Commit(
            requests,
            [len(request.tokens) for request in requests],
            [*num_own, *[0] * len(reading)],
            [None] * len(requests),
        )

    def _kept_states(self, request: Request, states: Mapping[int, StateRows]) -> StateRows:
        """The hidden states of the tokens that stay in the target's cache."""
        own = states[request.cache_slot]
        kept = self._target_cache.lengths[request.cache_slot] - own.start
        return own._replace(length=min(own.length, kept))

    def _append(
        self,
        request: Request,
        index: int,
        planned: list[int],
        outcome: Outcome,
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
        nodes = range(accepted) if outcome.paths is None else outcome.paths[index]
        copied: Collection[int] = () if outcome.copied is None else outcome.copied[index]
        sources = [TokenSource.COPY if node in copied else TokenSource.DRAFT for node in nodes]
        for place, (token, source) in enumerate(zip(tokens, [*sources, last], strict=True)):
            if request.append(token, source, None if logprobs is None else logprobs[place]):
                break
        # The newest token was not an input yet, and tokens beyond it were rejected.
        self._target_cache.truncate(request.cache_slot, len(request.tokens) - 1)
        if request.params.uses_penalties and len(request.tokens) > start:
            self._histories.append(request.cache_slot, request.tokens[start:])

    def _num_pending(self, request: Request) -> int:
        """Number of tokens that the target has not processed yet."""
        return len(request.tokens) - self._target_cache.lengths[request.cache_slot]

    def _admit(self) -> None:
        self._steps_since_joining += 1
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            if self._reserved_tokens + request.max_total_tokens > self.max_cached_tokens:
                return
            row = self._free_slots[0]
            self._target_cache.clear(row)
            request.cache_slot = row
            for follower in self._followers:
                follower.admit(request)
            if self._prefixes is not None:
                self._prefixes.admit(request)
            self._histories.begin(row, request.tokens if request.params.uses_penalties else ())
            if any(running.num_output_tokens for running in self._running.values()):
                self._steps_since_joining = 0
            # An interrupt here leaves the request in the running or waiting collection, or in both.
            self._running[row] = request
            self._waiting.popleft()
            heapq.heappop(self._free_slots)
            self._reserved_tokens += request.max_total_tokens

    def _prompt_chunks(self, running: list[Request]) -> list[PromptChunk]:
        """Distribute the step's prompt tokens in order of arrival. Returns chunks by cache slot."""
        chunks: list[PromptChunk] = []
        left = self._max_chunk_tokens
        for request in sorted(running, key=lambda r: r.request_id):
            if request.num_output_tokens or left == 0:
                continue
            if self._prefixes is not None:
                self._prefixes.restore(request)
            start = self._target_cache.lengths[request.cache_slot]
            end = min(len(request.tokens), start + left)
            chunks.append(PromptChunk(request, start, end))
            left -= end - start
        return sorted(chunks, key=lambda chunk: chunk.request.cache_slot)

    def _batch_controls(self, generating: list[Request]) -> LogitControls:
        """The batch's controls, rebuilt only when its requests change."""
        members = tuple(request.request_id for request in generating)
        controls = self._controls.get(members)
        if controls is not None:
            return controls
        controls = batch_controls(
            [request.params for request in generating],
            self._vocab_size,
            self._histories.device,
        )
        while len(self._controls) >= _KEPT_CONTROLS:
            del self._controls[next(iter(self._controls))]
        self._controls[members] = controls
        return controls

    def _retire(self, request: Request) -> None:
        if request.cache_slot == NO_CACHE_SLOT:
            self._waiting.remove(request)
            return
        slot = request.cache_slot
        self._leave_slot(request)
        del self._running[slot]
        heapq.heappush(self._free_slots, slot)
        self._reserved_tokens -= request.max_total_tokens

    def _leave_slot(self, request: Request) -> None:
        """Notify the followers once that a request ended, and detach it from its slot."""
        if request.cache_slot != NO_CACHE_SLOT:
            for follower in self._followers:
                follower.retire(request)
            request.cache_slot = NO_CACHE_SLOT
