"""The step loop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.types import Draft, Judgement, Plan, StepTimes
from draftwise.engine.controls import HistoryStore
from draftwise.engine.drafting import DraftSource, ModelDraft, NoDraft
from draftwise.engine.follower import Follower
from draftwise.engine.judging import Companion
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.request import Request
from draftwise.engine.scheduler import Batch, Scheduler
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


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine.

    Attributes:
        max_batch_size: requests that run at once.
        max_chunk_tokens: prompt tokens processed per step, over all requests.
        cache_bytes: memory for the keys and values of all models; ``None`` for no limit.
    """

    max_batch_size: int = 32
    max_chunk_tokens: int = 512
    cache_bytes: int | None = None


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
        policies: decide how much is drafted and verified.
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
    ) -> None:
        """Set up caches for loaded models.

        Args:
            models: loaded.
            speculation: how; required with a draft.
            options: sizes; ``None`` for the defaults.
            latency: what passes of the models cost here; needed by policies that price.
            profile: what is known of acceptance for these models.
            policy: a policy that is made already, instead of the one that ``speculation`` names.
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
        if policy is None:
            policy = create_policy(
                speculation.policy_name,
                replace(context, for_studies=True),
                speculation.policy_options,
            )

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
        self._drafter: DraftSource = NoDraft(target.model.device)
        if models.draft is not None and policy.needs_draft:
            self._drafter = ModelDraft(follower(models.draft), self._vocab_size, self._oracle)
        self._companion: Companion | None = None
        if models.companion is not None and policy.uses_companion():
            self._companion = Companion(follower(models.companion), self._vocab_size)
        # What later policies find here is what was set up for the first one.
        self.policies = Mixture(
            replace(
                context,
                has_draft=isinstance(self._drafter, ModelDraft),
                has_companion=self._companion is not None,
            ),
            policy,
        )
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
        self._ids = itertools.count()
        self._rest = 0.0
        self._num_timed = 0

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
        """Advance every running request; returns those that gained tokens or ended."""
        clock = Stopwatch()
        lenience = self._speculation.lenience_at(self._scheduler.num_waiting)
        batch = self._scheduler.next_batch(lenience)
        clock.lap("rest")
        draft = self._drafter.propose(batch, self.policies)
        clock.lap("draft")
        judgement = self._judge(batch, draft)
        clock.lap("companion")
        plan = self.policies.select(draft, judgement)
        clock.lap("select")
        logits = self._verifier.verify(batch, plan)
        clock.lap("verify")
        outcome = self._acceptance.accept(batch, draft, plan, logits)
        clock.lap("accept")
        self.times = self._counted(clock.times(self._rest, batch.num_prompt_tokens))
        self.policies.observe(outcome, self.times)
        self._learn_costs(batch, draft, judgement, plan)
        self._take_notes(batch, draft, judgement)
        advanced = self._scheduler.commit(batch, plan, outcome)
        self.policies.forget([r.request_id for r in advanced if r.finish_reason is not None])
        self._rest = clock.since_last_lap()
        return advanced

    def _counted(self, times: StepTimes) -> StepTimes:
        """The times without what a study's policy was told."""
        if self._oracle is None:
            return times
        told = self._oracle.take_seconds_of_drafting()
        return replace(times, draft=times.draft - told, companion=0.0)

    def _take_notes(self, batch: Batch, draft: Draft, judgement: Judgement | None) -> None:
        """Who does not get exactly the target's distribution in this step, and who was judged."""
        for index, request in enumerate(batch.generating):
            policy = self.policies.get(request.speculation.policy)
            strict = policy.lossless or request.params.temperature == 0
            if batch.lenience[index] < 1.0 or not strict:
                request.stats.lossless = False
            if judgement is not None and self._companion is not None:
                request.stats.num_judged += draft.lengths[index]

    def _judge(self, batch: Batch, draft: Draft) -> Judgement | None:
        """What the companion thinks of the draft, if there is one and the policy asks now."""
        if self._oracle is not None:
            return self._oracle.judgement(draft) if any(draft.lengths) else None
        if self._companion is None:
            return None
        if any(draft.lengths) and self.policies.wants_judgement():
            return self._companion.judge(batch, draft)
        self._companion.read_prompts(batch)
        return None

    def _learn_costs(
        self, batch: Batch, draft: Draft, judgement: Judgement | None, plan: Plan
    ) -> None:
        """Follow the machine: what this step cost, if no prompt was in it."""
        if self.latency is None or batch.chunks or not all(batch.can_draft):
            return
        self._num_timed += 1
        if self._num_timed > _APPRENTICESHIP and self._num_timed % _LEARN_EVERY:
            return
        times = self.times
        context = sum(len(request.tokens) for request in batch.generating)
        num_tokens = len(plan.lengths) + sum(plan.lengths)
        self.latency.observe_target(
            num_tokens,
            context,
            times.total - times.draft - times.companion - times.select,
        )
        depths = range(max(draft.lengths, default=0))
        self.latency.observe_draft(
            [sum(length > depth for length in draft.lengths) for depth in depths], times.draft
        )
        if judgement is not None:
            self.latency.observe_companion(sum(draft.lengths), times.companion)

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
        if "policy" in changes:
            changes.setdefault("policy_options", {})
        speculation = replace(self._speculation, **changes)
        if {"policy", "policy_options", "num_speculative_tokens"} & changes.keys():
            self.policies.reset(
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
        self._scheduler.cancel(request)
        self.policies.forget([request.request_id])

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


def _max_cached_tokens(caches: list[KVCache], cache_bytes: int | None) -> int:
    """Tokens that may be reserved over all requests."""
    whole = caches[0].num_rows * caches[0].capacity
    if cache_bytes is None:
        return whole
    return min(whole, cache_bytes // sum(cache.bytes_per_token for cache in caches))
