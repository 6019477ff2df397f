"""The step loop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwise.core.latency import LatencyModel
from draftwise.core.types import StepTimes
from draftwise.engine.controls import HistoryStore
from draftwise.engine.drafting import DraftSource, ModelDraft, NoDraft
from draftwise.engine.follower import Follower
from draftwise.engine.judging import Companion
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.overlap import Overlap, OverlapOptions
from draftwise.engine.request import Request
from draftwise.engine.scheduler import Batch, Scheduler
from draftwise.engine.side import PreparedStep, Side
from draftwise.engine.stopwatch import Stopwatch
from draftwise.engine.verification import Acceptance, TargetVerifier
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.models.kv_cache import KVCache
from draftwise.models.loading import LoadedModel
from draftwise.params import (
    RequestSpeculation,
    SamplingParams,
    SpeculationConfig,
    refuse_unknown_keys,
)
from draftwise.policies import Policy, PolicyContext, create_policy
from draftwise.policies.mixture import Mixture

if TYPE_CHECKING:
    from draftwise.engine.replicas.processes import Replicas


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine.

    Attributes:
        max_batch_size: requests that run at once.
        max_chunk_tokens: prompt tokens processed per step, over all requests.
        cache_bytes: memory for the keys and values of all models; ``None`` for no limit.
        overlap: draft for one half of the batch while the target verifies the other; ``None``
            never.
    """

    max_batch_size: int = 32
    max_chunk_tokens: int = 512
    cache_bytes: int | None = None
    overlap: OverlapOptions | None = None


@dataclass(frozen=True)
class Models:
    """The models of an engine.

    Attributes:
        target: the model whose distribution is kept.
        draft: the model that writes ahead; with the target's vocabulary.
        companion: the model that judges the draft; with the target's vocabulary.
    """

    target: LoadedModel
    draft: LoadedModel | None = None
    companion: LoadedModel | None = None


_CHANGEABLE = ("lenience", "num_speculative_tokens", "policy", "policy_options")
# Steps whose times are all learnt from, and then every how manieth.
_APPRENTICESHIP = 64
_LEARN_EVERY = 4


class Engine:
    """Generates for many requests at once; they join and leave between steps.

    Attributes:
        max_model_len: longest prompt and output together, in tokens.
        latency: what steps cost, followed while it runs; ``None`` if nobody asks.
        times: where the time of the last step went.
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
        """
        options = options or EngineOptions()
        if speculation is None:
            speculation = SpeculationConfig(draft="none", policy="none", num_speculative_tokens=0)
        target = models.target
        self.max_model_len = target.max_model_len
        self.latency = latency
        self.times = StepTimes(0, 0, 0, 0, 0, 0)
        self._tokenizer = target.tokenizer
        self._eos_token_ids = target.eos_token_ids
        self._vocab_size = target.model.vocab_size
        self._speculation = speculation
        context = PolicyContext(
            speculation.num_speculative_tokens,
            latency,
            profile,
            has_companion=models.companion is not None,
            has_draft=models.draft is not None,
        )
        is_given = policy is not None
        self._replicas = replicas
        if policy is None:
            policy = self._make_policy(context)

        num_rows = options.max_batch_size
        target_cache = target.model.new_cache(num_rows, target.max_model_len)
        caches = [target_cache]

        def follower(model: LoadedModel) -> Follower:
            cache = model.model.new_cache(num_rows, model.max_model_len)
            caches.append(cache)
            return Follower(model.model, cache, self._vocab_size)

        self._oracle: TargetOracle | None = None
        if policy.judged_by_target:
            self._oracle = TargetOracle(follower(target))
        draft = companion = None
        if models.draft is not None and policy.needs_draft:
            draft = follower(models.draft)
        if models.companion is not None and policy.uses_companion():
            companion = follower(models.companion)
        # What later policies find here is what was set up for the first one.
        context = replace(context, has_draft=draft is not None, has_companion=companion is not None)

        def side(own: Policy) -> Side:
            drafter: DraftSource = NoDraft(target.model.device)
            if draft is not None and replicas is not None:
                # Not every PyTorch can speak to other processes.
                from draftwise.engine.replicas.drafting import in_shares

                return Side(
                    Mixture(context, own),
                    *in_shares(replicas, draft, companion, self._vocab_size),
                )
            if draft is not None:
                drafter = ModelDraft(draft, self._vocab_size, self._oracle)
            judge = None if companion is None else Companion(companion, self._vocab_size)
            return Side(Mixture(context, own), drafter, judge, self._oracle)

        if replicas is not None and policy.judged_by_target:
            raise InvalidParameterError(
                "draft_replicas", f"policy {policy.name!r} asks the target while it drafts"
            )
        self._sides = [side(policy)]
        self._overlap: Overlap | None = None
        if options.overlap is not None and draft is not None:
            _check_overlap(policy, is_given, replicas is not None, target.model.device)
            self._sides.append(side(self._make_policy(context)))
            self._overlap = Overlap(latency, options.overlap.interference)
        self._histories = HistoryStore(num_rows, self._vocab_size, target.model.device)
        self._scheduler = Scheduler(
            caches,
            self._histories,
            self._vocab_size,
            options.max_chunk_tokens,
            speculation.num_speculative_tokens,
            _max_cached_tokens(caches, options.cache_bytes),
        )
        self._verifier = TargetVerifier(target.model, target_cache)
        self._acceptance = Acceptance(speculation.verification)
        self._advanced: list[Request] = []
        self._ids = itertools.count()
        self._rest = 0.0
        self._num_timed = 0

    @property
    def policies(self) -> Mixture:
        """Those that decide how much is drafted and verified; of the first half of the batch."""
        return self._sides[0].policies

    @property
    def uncounted_seconds(self) -> float:
        """Time that was spent on telling a study's policy what no policy can know."""
        return 0.0 if self._oracle is None else self._oracle.seconds

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self._scheduler.num_unfinished

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advance every running request; returns those that gained tokens or ended.

        Where halves of the batch overlap it is one half that advances.
        """
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
        lenience = self._speculation.lenience_at(self._scheduler.num_waiting)
        batch = self._scheduler.next_batch(lenience, half)
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
        self._learn_costs(step)
        self._take_notes(step)
        advanced = self._scheduler.commit(batch, step.plan, outcome)
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

    def _learn_costs(self, step: PreparedStep) -> None:
        """Follow the machine: what this step cost, if no prompt and no other step was in it."""
        batch, times, lengths = step.batch, self.times, step.draft.lengths
        if times.shared or batch.chunks or not batch.generating or not all(batch.can_draft):
            return
        context = sum(len(request.tokens) for request in batch.generating)
        num_tokens = len(step.plan.lengths) + sum(step.plan.lengths)
        if self._overlap is not None:
            self._overlap.observe(num_tokens, context, lengths)
        self._num_timed += 1
        if self.latency is None:
            return
        if self._num_timed > _APPRENTICESHIP and self._num_timed % _LEARN_EVERY:
            return
        self.latency.observe_target(
            num_tokens,
            context,
            times.total - times.draft - times.companion - times.select,
        )
        depths = range(max(lengths, default=0))
        self.latency.observe_draft(
            [sum(length > depth for length in lengths) for depth in depths], times.draft
        )
        if step.judgement is not None:
            self.latency.observe_companion(sum(lengths), times.companion)

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
        self._settle()
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
            InvalidParameterError: a token of the parameters does not exist, or the policy that
                the request asks for cannot be used here.
            CacheExhaustedError: it may need more cache than there is in all.
        """
        self._check(prompt_ids, params)
        speculation = speculation or RequestSpeculation()
        self.policies.get(speculation.policy)
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        request = Request(
            next(self._ids),
            prompt,
            prompt_ids,
            params,
            self._tokenizer,
            stop_token_ids,
            self.max_model_len,
            speculation,
        )
        self._scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; what it has so far is its output."""
        self._settle()
        self._scheduler.cancel(request)
        for side in self._sides:
            side.policies.forget([request.request_id])

    def close(self) -> None:
        """End the threads and processes that it has beside the caller's own."""
        if self._overlap is not None:
            self._settle()
            self._overlap.close()
        if self._replicas is not None:
            self._replicas.close()

    def _make_policy(self, context: PolicyContext) -> Policy:
        return create_policy(
            self._speculation.policy_name,
            replace(context, for_studies=True),
            self._speculation.policy_options,
        )

    def _check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        if not prompt_ids:
            raise PromptError("prompt", "is empty; give at least one token")
        if len(prompt_ids) >= self.max_model_len:
            raise PromptError(
                "prompt",
                f"has {len(prompt_ids)} tokens and the context holds {self.max_model_len} with at "
                "least one generated token; shorten it or raise max_model_len",
            )
        for token in prompt_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise PromptError("prompt", f"token ids must be integers, got {token!r}")
            if not 0 <= token < self._vocab_size:
                raise PromptError(
                    "prompt", f"token {token} is outside the vocabulary of {self._vocab_size}"
                )
        for name, tokens in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in tokens:
                if token >= self._vocab_size:
                    raise InvalidParameterError(
                        name, f"token {token} is outside the vocabulary of {self._vocab_size}"
                    )
        if params.stop and self._tokenizer is None:
            raise InvalidParameterError(
                "stop", "the target has no tokenizer; use stop_token_ids instead"
            )


def _check_overlap(
    policy: Policy, is_given: bool, has_replicas: bool, device: torch.device
) -> None:
    """Refuse what cannot be done in two halves.

    Raises:
        InvalidParameterError: why not.
    """
    why = None
    if device.type != "cpu":
        why = f"is for models on the CPU so far, not on {device.type!r}"
    elif policy.judged_by_target:
        why = f"leaves no target to policy {policy.name!r}, which asks it while drafting"
    elif has_replicas:
        why = "cannot be had together with draft_replicas"
    elif is_given:
        why = "needs a policy for each half; name it instead of giving one that is made"
    if why is not None:
        raise InvalidParameterError("overlap", why)


def _max_cached_tokens(caches: list[KVCache], cache_bytes: int | None) -> int:
    """Tokens that may be reserved over all requests."""
    whole = caches[0].num_rows * caches[0].capacity
    if cache_bytes is None:
        return whole
    return min(whole, cache_bytes // sum(cache.bytes_per_token for cache in caches))
