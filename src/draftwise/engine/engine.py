"""The step loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwise.core.latency import LatencyModel
from draftwise.core.types import StepTimes
from draftwise.engine.admission import check_params, check_prompt
from draftwise.engine.assembly import EngineOptions, Models, assemble
from draftwise.engine.batch import Batch
from draftwise.engine.controls import HistoryStore
from draftwise.engine.costs import CostLearner
from draftwise.engine.grammars import GrammarCompiler
from draftwise.engine.logprobs import token_logprobs
from draftwise.engine.overlap import Overlap
from draftwise.engine.request import Request
from draftwise.engine.scheduler import Scheduler
from draftwise.engine.side import PreparedStep
from draftwise.engine.stopwatch import Stopwatch
from draftwise.engine.turns import Turns
from draftwise.engine.verification import Acceptance, TargetVerifier
from draftwise.errors import ClosedError, DraftwiseError, EngineError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.models.kv_cache import KVCache
from draftwise.params import (
    RequestSpeculation,
    SamplingParams,
    SpeculationConfig,
    refuse_unknown_keys,
)
from draftwise.policies import Policy
from draftwise.policies.mixture import Mixture

if TYPE_CHECKING:
    from draftwise.engine.replicas.processes import Replicas

_CHANGEABLE = ("lenience", "num_speculative_tokens", "policy", "policy_options")


class Engine:
    """Generates for many requests at once; they join and leave between steps.

    Safe to use from several threads: each method waits for its turn. A step advances the requests
    of all threads, so a thread that runs its own step loop looks at its requests rather than at
    what its own :meth:`step` returns, and holds :attr:`turns` while it does.

    Attributes:
        turns: the lock; shared with all engines that share a model with this one.
        max_model_len: longest prompt and output together, in tokens.
        latency: what steps cost, followed while it runs; ``None`` if nobody asks.
        times: where the time of the last step went.
        grammars: makes what follows texts that must have a form; may be asked beforehand, from
            another thread too.
    """

    def __init__(
        self,
        models: Models,
        speculation: SpeculationConfig | None = None,
        options: EngineOptions | None = None,
        latency: LatencyModel | None = None,
        profile: AcceptanceProfile | None = None,
        policy: Policy | None = None,
        replicas: Replicas | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Set up caches for loaded models.

        Args:
            models: loaded.
            speculation: how; required with a draft.
            options: sizes; ``None`` for the defaults.
            latency: what passes of the models cost here; needed by policies that price.
            profile: what is known of acceptance for these models.
            policy: a policy that is made already, instead of the one that ``speculation`` names.
            replicas: processes that draft and judge for a share of every batch.
            turns: of engines that share a model with this one; ``None`` if there are none.
        """
        self.turns = turns or Turns()
        options = options or EngineOptions()
        if speculation is None:
            speculation = SpeculationConfig(draft="none", policy="none", num_speculative_tokens=0)
        target = models.target
        self.max_model_len = target.max_model_len
        self.latency = latency
        self.times = StepTimes(0, 0, 0, 0, 0, 0)
        self.grammars = GrammarCompiler(target.tokenizer, target.eos_token_ids)
        self._tokenizer = target.tokenizer
        self._eos_token_ids = target.eos_token_ids
        self._vocab_size = target.model.vocab_size
        self._speculation = speculation
        self._replicas = replicas
        parts = assemble(models, speculation, options, latency, profile, policy, replicas)
        self._sides, self._overlap, self._oracle = parts.sides, parts.overlap, parts.oracle
        self._costs = CostLearner(latency, parts.overlap)
        self._scheduler = Scheduler(
            parts.caches,
            HistoryStore(options.max_batch_size, self._vocab_size, target.model.device),
            self._vocab_size,
            options.max_chunk_tokens,
            speculation.num_speculative_tokens,
            _max_cached_tokens(parts.caches, options.cache_bytes),
        )
        self._verifier = TargetVerifier(target.model, parts.caches[0])
        self._acceptance = Acceptance(speculation.verification)
        self._advanced: list[Request] = []
        self._ids = itertools.count()
        self._rest = 0.0
        self._unusable: DraftwiseError | None = None

    @property
    def policies(self) -> Mixture:
        """Those that decide how much is drafted and verified; of the first half of the batch."""
        self._check_usable()
        return self._sides[0].policies

    @property
    def uncounted_seconds(self) -> float:
        """Time that was spent on telling a study's policy what no policy can know."""
        return 0.0 if self._oracle is None else self._oracle.seconds

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self._scheduler.num_unfinished

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in the batch."""
        return self._scheduler.num_waiting

    @property
    def cache_usage(self) -> float:
        """Share of the cache that is promised to running requests."""
        return self._scheduler.num_reserved_tokens / self._scheduler.max_cached_tokens

    @property
    def lenience(self) -> float:
        """Of requests that have none of their own, at the number that waits now."""
        return self._speculation.lenience_at(self._scheduler.num_waiting)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advance every running request; returns those that gained tokens or ended.

        Where halves of the batch overlap it is one half that advances. An exception ends all
        requests with an :class:`EngineError`; the engine can be used on. After a
        ``KeyboardInterrupt`` they are as before the step, and the next step goes on.
        """
        with self.turns:
            self._check_usable()
            try:
                return self._step()
            except BaseException as error:
                self._recover(error)
                raise

    def _step(self) -> list[Request]:
        if self._overlap is not None and self._overlap.pays(self._scheduler.num_running):
            advanced = self._half_step(self._overlap)
        else:
            self._settle()
            advanced = self._whole_step()
        return [*self._take_advanced(), *advanced]

    def _whole_step(self) -> list[Request]:
        """Everybody takes part, and one thing is done after the other."""
        clock = Stopwatch()
        step = self._sides[0].prepare(self._next_batch(clock), clock)
        logits = self._verifier.verify(step.batch, step.plan)
        clock.lap("verify")
        return self._finish(step, logits)

    def _half_step(self, overlap: Overlap) -> list[Request]:
        """Verify one half while the other is prepared."""
        half = 0 if overlap.ahead is None else 1 - self._sides.index(overlap.ahead.side)
        clock = Stopwatch()
        batch = self._next_batch(clock, half)
        if batch.is_empty:
            if overlap.ahead is None:
                return self._whole_step()
            self._settle()
            return []
        done, logits = overlap.step(self._verifier, self._sides[half], batch, clock)
        return [] if done is None else self._finish(done, logits, shared=True)

    def _settle(self) -> None:
        """Finish a half-batch that is ahead, so that all requests stand between two steps."""
        if self._overlap is not None:
            done = self._overlap.verify(self._verifier)
            if done is not None:
                self._advanced += self._finish(*done, shared=True)

    def _take_advanced(self) -> list[Request]:
        """Requests that gained tokens outside of a step."""
        advanced, self._advanced = self._advanced, []
        return advanced

    def _next_batch(self, clock: Stopwatch, half: int | None = None) -> Batch:
        batch = self._scheduler.next_batch(self.lenience, half)
        clock.lap("rest")
        return batch

    @torch.inference_mode()
    def _finish(
        self, step: PreparedStep, logits: Tensor | None, shared: bool = False
    ) -> list[Request]:
        """Accept, learn and commit.

        Args:
            step: that was verified.
            logits: of the target.
            shared: whether something else ran beside it.
        """
        batch, clock = step.batch, step.clock
        outcome = self._acceptance.accept(batch, step.draft, step.plan, logits)
        clock.lap("accept")
        times = clock.times(self._rest, batch.num_prompt_tokens)
        self.times = self._counted(replace(times, shared=shared))
        step.side.policies.observe(outcome, self.times)
        self._costs.observe(step, self.times)
        self._take_notes(step)
        told = token_logprobs(batch, step.plan, outcome, logits)
        advanced = self._scheduler.commit(batch, step.plan, outcome, told)
        ended = [r.request_id for r in advanced if r.finish_reason is not None]
        for side in self._sides:
            side.policies.forget(ended)
        self._rest = clock.since_last_lap()
        return advanced

    def _counted(self, times: StepTimes) -> StepTimes:
        """The times without what a study's policy was told."""
        if self._oracle is None:
            return times
        told = self._oracle.take_seconds_of_drafting()
        return replace(times, draft=times.draft - told, companion=0.0)

    def _take_notes(self, step: PreparedStep) -> None:
        """Who does not get exactly the target's distribution in this step, and who was judged."""
        batch = step.batch
        for index, request in enumerate(batch.generating):
            policy = step.side.policies.get(request.speculation.policy)
            strict = policy.lossless or request.params.temperature == 0
            if batch.lenience[index] < 1.0 or not strict:
                request.stats.lossless = False
            if step.judgement is not None and self._oracle is None:
                request.stats.num_judged += step.draft.lengths[index]

    def change_speculation(self, **changes: Any) -> SpeculationConfig:
        """Speculate in another way from the next step on, also for requests that run.

        Args:
            changes: new values of ``policy``, ``policy_options``, ``num_speculative_tokens`` or
                ``lenience``; a new policy has its standard options unless some are given.

        Returns:
            What holds from now on.

        Raises:
            InvalidParameterError: a value is out of its range, another field of the configuration
                cannot be changed while running, or the policy needs what the engine was started
                without.
        """
        refuse_unknown_keys("speculation", changes, _CHANGEABLE)
        with self.turns:
            self._check_usable()
            self._settle_or_recover()
            return self._change_speculation(changes)

    def _change_speculation(self, changes: dict[str, Any]) -> SpeculationConfig:
        if "policy" in changes:
            changes.setdefault("policy_options", {})
        speculation = replace(self._speculation, **changes)
        if {"policy", "policy_options", "num_speculative_tokens"} & changes.keys():
            for side in self._sides:
                side.policies.reset(
                    speculation.policy_name,
                    speculation.num_speculative_tokens,
                    speculation.policy_options,
                )
            self._scheduler.max_draft_length = speculation.num_speculative_tokens
        self._speculation = speculation
        return speculation

    def add(
        self,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        speculation: RequestSpeculation | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: its text, to be handed back; ``None`` if there is none.
            prompt_ids: its tokens.
            params: how to generate.
            speculation: how to speculate for this request, where it differs from the engine's.

        Raises:
            PromptError: empty, too long for the context, or with tokens the model does not have.
            InvalidParameterError: a token of the parameters does not exist, the policy that the
                request asks for cannot be used here, or the form that its text must have cannot
                be followed.
            CacheExhaustedError: it may need more cache than there is in all.
        """
        check_prompt(prompt_ids, self.max_model_len, self._vocab_size)
        check_params(params, self._vocab_size, self._tokenizer is not None)
        speculation = speculation or RequestSpeculation()
        form = params.structured_outputs
        matcher = None if form is None else self.grammars.matcher(form)
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        with self.turns:
            self._check_usable()
            self.policies.get(speculation.policy)
            request = Request(
                next(self._ids),
                prompt,
                prompt_ids,
                params,
                self._tokenizer,
                stop_token_ids,
                self.max_model_len,
                speculation,
                matcher,
            )
            self._scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; what it has so far is its output."""
        with self.turns:
            self._cancel([request])

    def cancel_soon(self, requests: Sequence[Request]) -> None:
        """End requests before the next step, without waiting for a turn: for finalisers."""
        self.turns.do_soon(partial(self._cancel, requests))

    def _cancel(self, requests: Sequence[Request]) -> None:
        running = [request for request in requests if request.finish_reason is None]
        if not running:
            return
        try:
            self._settle()
            for request in running:
                self._scheduler.cancel(request)
        except BaseException as error:  # of the half-batch that was ahead
            self._recover(error)
            if not isinstance(error, Exception):
                raise
        for side in self._sides:
            side.policies.forget([request.request_id for request in running])

    def close(self) -> None:
        """Give back memory, threads and processes; requests that are left end with an error.

        Afterwards nothing can be added and no step can be taken.
        """
        with self.turns:
            closed = ClosedError("engine", "it was closed; load the models anew")
            self._scheduler.end_all(closed)
            self._unusable = closed
            if self._overlap is not None:
                self._overlap.abandon()
                self._overlap.close()
            if self._replicas is not None:
                self._replicas.close()
            self._scheduler.close()
            self._sides, self._overlap, self._oracle = [], None, None
            self._verifier = self._costs = None  # type: ignore[assignment]

    def _check_usable(self) -> None:
        """Raises what made it unusable, if something did."""
        if self._unusable is not None:
            raise self._unusable

    def _settle_or_recover(self) -> None:
        try:
            self._settle()
        except BaseException as error:
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        """Return to the state between two steps, after an exception inside of one."""
        if self._overlap is not None:
            self._overlap.abandon()
        self._scheduler.recover()
        if self._replicas is not None and self._unusable is None:
            # What they were asked may still be on its way.
            self._unusable = EngineError("engine", f"a step with replicas broke off: {error!r}")
        if isinstance(error, Exception) or self._replicas is not None:
            self._scheduler.end_all(EngineError("engine", f"a step failed: {error!r}"))


def _max_cached_tokens(caches: list[KVCache], cache_bytes: int | None) -> int:
    """Tokens that may be reserved over all requests."""
    whole = caches[0].num_rows * caches[0].capacity
    if cache_bytes is None:
        return whole
    return min(whole, cache_bytes // sum(cache.bytes_per_token for cache in caches))
