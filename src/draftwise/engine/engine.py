"""The step loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.types import StepTimes
from draftwise.engine.acceptance import Acceptance
from draftwise.engine.assembly import Assembly, EngineOptions, Models
from draftwise.engine.batch import Batch
from draftwise.engine.grammars import GrammarCompiler
from draftwise.engine.logprobs import token_logprobs
from draftwise.engine.prefix_cache import PrefixStats
from draftwise.engine.request import Request, check_params, check_prompt
from draftwise.engine.step import CostLearner, PreparedStep, SpeculationPipeline, Step, Stopwatch
from draftwise.engine.turns import Turns
from draftwise.engine.verification import Verified
from draftwise.errors import ClosedError, DraftwiseError, EngineError, InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.params import SamplingParams
from draftwise.policies import Policy
from draftwise.policies.router import PolicyRouter
from draftwise.speculation import MAX_SPECULATIVE_TOKENS, RequestSpeculation, SpeculationConfig
from draftwise.values import refuse_unknown_keys

_CHANGEABLE = ("lenience", "num_speculative_tokens", "policy", "policy_options")


class Engine:
    """Generates for many requests at once. Requests join and leave between steps.

    Safe to use from several threads: each method waits for its turn. A step advances the requests
    of all threads. So a thread with its own step loop must inspect its requests instead of the
    return value of :meth:`step`, and must hold :attr:`turns` while it does.

    Attributes:
        turns: the lock, shared by all engines that share a model.
        max_model_len: maximum length of prompt and output together, in tokens.
        latency: the model of step costs, updated while the engine runs; ``None`` if no policy uses
            it.
        times: the time that each part of the last step took.
        step_times: the same of all steps that ended since the call of :meth:`step` before the last
            one.
        simulated_times: computes these times from the step's work, to simulate another machine;
            ``None`` to measure them.
        grammars: compiles grammars for structured outputs. It may be called ahead of a request,
            also from another thread.
        corpus: texts that drafts may continue beside the request's own; ``None`` without a corpus.
            It may be used from any thread.
    """

    def __init__(
        self,
        models: Models,
        speculation: SpeculationConfig | None = None,
        options: EngineOptions | None = None,
        latency: LatencyModel | None = None,
        profile: AcceptanceProfile | None = None,
        policy: Policy | None = None,
        turns: Turns | None = None,
        pipelines: Callable[[Assembly], list[SpeculationPipeline]] = Assembly.pipelines,
    ) -> None:
        """Allocate caches for loaded models.

        Args:
            models: the loaded models.
            speculation: how to speculate; required with a draft model.
            options: size limits; ``None`` for the defaults.
            latency: cost of the models' forward passes on this machine; required by policies that
                price their choices.
            profile: acceptance statistics of these models.
            policy: an existing policy object to use instead of the one that ``speculation`` names.
            turns: the lock of engines that share a model with this one; ``None`` if there are none.
            pipelines: creates the pipelines. Each one has its own policies, and :meth:`_advance`
                uses the first.
        """
        self.turns = turns or Turns()
        if speculation is None:
            speculation = SpeculationConfig(draft="none", policy="none", num_speculative_tokens=0)
        parts = Assembly(models, speculation, options or EngineOptions(), latency, profile, policy)
        target = models.target
        self.max_model_len = target.max_model_len
        self.latency = latency
        self.times = StepTimes(0, 0, 0, 0, 0, 0)
        self.step_times: Sequence[StepTimes] = ()
        self._times_since_step: list[StepTimes] = []
        self.simulated_times: Callable[[Step], StepTimes] | None = None
        self.grammars = GrammarCompiler(target.tokenizer, target.eos_token_ids)
        self.corpus = parts.corpus
        self._tokenizer = target.tokenizer
        self._eos_token_ids = target.eos_token_ids
        self._vocab_size = target.model.vocab_size
        self._max_new_tokens = parts.max_new_tokens
        self._speculation = speculation
        self._prefixes = parts.prefixes
        self._pipelines = pipelines(parts)
        self._pipeline = self._pipelines[0]
        self._scheduler = parts.scheduler(self._pipelines)
        self._verifier = parts.verifier(self._pipeline.proposer.state_layers)
        self._acceptance = Acceptance(speculation.verification)
        self._costs = CostLearner(latency)
        self._ids = itertools.count()
        self._rest = 0.0
        self._unusable: DraftwiseError | None = None

    @property
    def pipeline(self) -> SpeculationPipeline:
        """What drafts, scores and selects tokens."""
        self._check_usable()
        return self._pipeline

    @property
    def policies(self) -> PolicyRouter:
        """The policies that decide how much is drafted and verified."""
        return self.pipeline.policies

    @property
    def uncounted_seconds(self) -> float:
        """Time spent in the target oracle, which studies exclude from the measured time."""
        oracle = self._pipeline.oracle
        return 0.0 if oracle is None else oracle.seconds

    @property
    def prefix_stats(self) -> PrefixStats:
        """How much of the prompts was found in the prefix cache so far."""
        return PrefixStats() if self._prefixes is None else replace(self._prefixes.stats)

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return self._scheduler.num_unfinished

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a place in the batch."""
        return self._scheduler.num_waiting

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a prompt and its output together that fit the context and the caches."""
        return min(self.max_model_len, self._scheduler.max_cached_tokens)

    @property
    def cache_usage(self) -> float:
        """Fraction of the cache that is reserved for running requests."""
        return self._scheduler.num_reserved_tokens / self._scheduler.max_cached_tokens

    @property
    def guard_balance(self) -> float | None:
        """Steps without drafts that later drafts may cost; ``None`` without a guard."""
        guard = self._pipeline.policies.guard
        return guard.balance if guard is not None and guard.enabled else None

    @property
    def lenience(self) -> float:
        """The lenience of requests that set none, at the current number of waiting requests."""
        return self._speculation.lenience_at(self._scheduler.num_waiting)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advance every running request. Returns those that gained tokens or ended.

        An exception ends all requests with an :class:`EngineError`; the engine remains usable.
        After a ``KeyboardInterrupt`` the requests are as before the step, and the next step
        continues with them.
        """
        with self.turns:
            self._check_usable()
            try:
                advanced = self._advance()
            except BaseException as error:
                self._recover(error)
                raise
            self.step_times, self._times_since_step = self._times_since_step, []
            return advanced

    def _advance(self) -> list[Request]:
        """One whole step; returns the requests that gained tokens or ended."""
        clock = Stopwatch()
        batch = self._scheduler.next_batch(self.lenience)
        clock.lap("rest")
        step = self._prepare(self._pipeline, batch, clock)
        return self._accept(step, self._verify(step))

    @staticmethod
    def _prepare(pipeline: SpeculationPipeline, batch: Batch, clock: Stopwatch) -> PreparedStep:
        """Draft, and decide what is verified."""
        draft = pipeline.propose(batch)
        clock.lap("draft")
        scores = pipeline.score(batch, draft)
        clock.lap("companion")
        plan = pipeline.select(draft, scores)
        clock.lap("select")
        return PreparedStep(pipeline, clock, batch, draft, scores, plan)

    def _verify(self, step: PreparedStep) -> Verified:
        """The target's pass."""
        verified = self._verifier.verify(step.batch, step.plan)
        step.clock.lap("verify")
        return verified

    def _accept(self, step: PreparedStep, verified: Verified) -> list[Request]:
        """Apply the acceptance law, and commit the step; returns its requests."""
        outcome = self._acceptance.accept(step.batch, step.draft, step.plan, verified.logits)
        step.clock.lap("accept")
        computed = vars(step) | verified._asdict()
        return self._commit(Step(**computed, outcome=outcome))

    def _commit(self, step: Step) -> list[Request]:
        """Learn from a step and append its tokens; returns its requests."""
        batch, outcome, policies = step.batch, step.outcome, step.pipeline.policies
        self.times = self._times_of(step)
        self._times_since_step.append(self.times)
        policies.observe(outcome, self.times)
        self._costs.observe(step, self.times)
        num_before = step.take_notes()
        if outcome.paths is not None:
            step = self._verifier.keep_paths(step)
        plan = step.accepted or step.plan
        wanted = batch.wants_logprobs
        logprobs = token_logprobs(batch, plan, outcome, step.logits) if wanted else {}
        advanced = self._scheduler.commit(batch, plan, outcome, logprobs, step.states)
        step.note_savings(num_before)
        self._forget([r.request_id for r in advanced if r.finish_reason is not None])
        self._rest = step.clock.since_last_lap()
        return advanced

    def _times_of(self, step: Step) -> StepTimes:
        if self.simulated_times is not None:
            return self.simulated_times(step)
        return step.pipeline.counted(step.clock.times(self._rest, step.batch.num_prompt_tokens))

    def _forget(self, request_ids: list[int]) -> None:
        for pipeline in self._pipelines:
            pipeline.policies.forget(request_ids)

    @property
    def max_num_speculative_tokens(self) -> int:
        """The largest number of speculative tokens to which a running engine can be changed."""
        branches = self._speculation.tree_width > 1
        return min(MAX_SPECULATIVE_TOKENS - branches, self._max_new_tokens - 1)

    def change_speculation(self, **changes: Any) -> SpeculationConfig:
        """Change how the engine speculates from the next step on, also for running requests.

        Args:
            changes: new values of ``policy``, ``policy_options``, ``num_speculative_tokens`` or
                ``lenience``. A new policy uses its default options unless some are given.

        Returns:
            The new configuration.

        Raises:
            InvalidParameterError: a value is out of range, a field cannot be changed while the
                engine runs, or the policy needs something that the engine was started without.
        """
        refuse_unknown_keys("speculation", changes, _CHANGEABLE)
        with self.turns:
            self._check_usable()
            if "policy" in changes:
                changes.setdefault("policy_options", {})
            speculation = replace(self._speculation, **changes)
            num_tokens = speculation.num_speculative_tokens
            if num_tokens >= self._max_new_tokens:
                raise InvalidParameterError(
                    "num_speculative_tokens",
                    f"must be less than {self._max_new_tokens} while the engine runs, "
                    f"got {num_tokens}",
                )
            if {"policy", "policy_options", "num_speculative_tokens"} & changes.keys():
                for pipeline in self._pipelines:
                    pipeline.policies.reset(
                        speculation.policy_name, num_tokens, speculation.policy_options
                    )
                self._scheduler.max_draft_length = num_tokens
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
            prompt: its text, returned with the output; ``None`` if there is none.
            prompt_ids: its tokens.
            params: sampling parameters.
            speculation: settings for this request that differ from the engine's.

        Raises:
            PromptError: the prompt is empty, too long for the context, or has tokens outside the
                vocabulary.
            InvalidParameterError: a token in the parameters does not exist, the requested policy or
                draft cannot be used with this engine, the requested drafts are longer than the
                engine's, or the grammar cannot be used.
            CacheExhaustedError: the request may need more than the whole cache.
        """
        check_prompt(prompt_ids, self.max_model_len, self._vocab_size)
        check_params(params, self._vocab_size, self._tokenizer is not None)
        speculation = speculation or RequestSpeculation()
        drafts = self._speculation.draft_names
        if speculation.draft not in (None, *drafts):
            raise InvalidParameterError(
                "speculation.draft",
                f"must be one of the engine's drafts, {', '.join(map(repr, drafts))}; "
                f"got {speculation.draft!r}",
            )
        self._check_draft_length(speculation)
        grammar = params.structured_outputs
        matcher = None if grammar is None else self.grammars.matcher(grammar)
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

    def _check_draft_length(self, speculation: RequestSpeculation) -> None:
        own, most = speculation.num_speculative_tokens, self._speculation.num_speculative_tokens
        if own is not None and own > most:
            raise InvalidParameterError(
                "speculation.num_speculative_tokens",
                f"must be at most the engine's, {most}, got {own}; raise the engine's first, at "
                f"the start or while it runs",
            )

    def cancel(self, request: Request) -> None:
        """End a request. Its output is what was generated so far."""
        with self.turns:
            self._cancel([request])

    def cancel_soon(self, requests: Sequence[Request]) -> None:
        """End requests before the next step, without waiting for a turn. Finalisers may call it."""
        self.turns.do_soon(partial(self._cancel, requests))

    def _cancel(self, requests: Sequence[Request]) -> None:
        running = [request for request in requests if request.finish_reason is None]
        if not running:
            return
        try:
            for request in running:
                self._scheduler.cancel(request)
        except BaseException as error:
            self._recover(error)
            if not isinstance(error, Exception):
                raise
        self._forget([request.request_id for request in running])

    def close(self) -> None:
        """Release memory, threads and processes. Unfinished requests end with an error.

        A closed engine accepts no requests and takes no steps.
        """
        with self.turns:
            if not isinstance(self._unusable, ClosedError):
                self._close()

    def _close(self) -> None:
        closed = ClosedError("engine", "it was closed; load the models again")
        self._scheduler.end_all(closed)
        self._unusable = closed
        self._scheduler.close()
        for pipeline in self._pipelines:
            pipeline.close()
        self._pipelines = []
        self._prefixes = None
        self._pipeline = self._verifier = self._costs = None  # type: ignore[assignment]

    def _check_usable(self) -> None:
        """Raise the error that made the engine unusable, if there was one."""
        if self._unusable is not None:
            raise self._unusable

    def _recover(self, error: BaseException) -> None:
        """Return to the state between two steps after an exception during a step."""
        requests = self._scheduler.unfinished
        try:
            self._scheduler.recover()
        except EngineError as lost:
            self._unusable = self._unusable or lost
        except Exception as failed:
            broken = EngineError("engine", f"its state was lost after an error: {failed!r}")
            self._unusable = self._unusable or broken
        if isinstance(error, Exception) or self._unusable is not None:
            self._scheduler.end_all(EngineError("engine", f"a step failed: {error!r}"))
        self._forget([r.request_id for r in requests if r.finish_reason is not None])
