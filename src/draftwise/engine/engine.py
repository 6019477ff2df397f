"""The step loop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from draftwise.engine.controls import HistoryStore
from draftwise.engine.drafting import DraftSource, ModelDraft, NoDraft
from draftwise.engine.request import Request
from draftwise.engine.scheduler import Scheduler
from draftwise.engine.verification import Acceptance, TargetVerifier
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.models.kv_cache import KVCache
from draftwise.models.loading import LoadedModel
from draftwise.params import SamplingParams, SpeculationConfig
from draftwise.policies import Policy, create_policy


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


class Engine:
    """Generates for many requests at once; they join and leave between steps.

    Attributes:
        max_model_len: longest prompt and output together, in tokens.
        lossless: whether the output keeps exactly the target's distribution.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        speculation: SpeculationConfig | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        """Set up caches for loaded models.

        Args:
            target: the model whose distribution is kept.
            draft: the model that writes ahead; with the target's vocabulary.
            speculation: how; required with a draft.
            options: sizes; ``None`` for the defaults.
        """
        options = options or EngineOptions()
        num_rows = options.max_batch_size
        if speculation is None:
            speculation = SpeculationConfig(draft="none", policy="none", num_speculative_tokens=0)
        self.max_model_len = target.max_model_len
        self._tokenizer = target.tokenizer
        self._eos_token_ids = target.eos_token_ids
        self._vocab_size = target.model.vocab_size
        self.policy: Policy = create_policy(
            speculation.policy, speculation.num_speculative_tokens, speculation.policy_options
        )
        self.lossless = self.policy.lossless and speculation.lenience == 1.0

        target_cache = target.model.new_cache(num_rows, target.max_model_len)
        caches = [target_cache]
        self._drafter: DraftSource = NoDraft(target.model.device)
        if draft is not None and self.policy.needs_draft:
            draft_cache = draft.model.new_cache(num_rows, draft.max_model_len)
            caches.append(draft_cache)
            self._drafter = ModelDraft(draft.model, draft_cache, self._vocab_size)
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
        self._acceptance = Acceptance(speculation.verification, speculation.lenience)
        self._ids = itertools.count()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self._scheduler.num_unfinished

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advance every running request; returns those that gained tokens or ended."""
        batch = self._scheduler.next_batch()
        draft = self._drafter.propose(batch, self.policy)
        plan = self.policy.select(draft)
        logits = self._verifier.verify(batch, plan)
        outcome = self._acceptance.accept(batch, draft, plan, logits)
        self.policy.observe(outcome)
        return self._scheduler.commit(batch, plan, outcome)

    def add(self, prompt: str | None, prompt_ids: list[int], params: SamplingParams) -> Request:
        """Queue a request.

        Args:
            prompt: its text, to be handed back; ``None`` if there is none.
            prompt_ids: its tokens.
            params: how to generate.

        Raises:
            PromptError: empty, too long for the context, or with tokens the model does not have.
            InvalidParameterError: a token of the parameters does not exist.
            CacheExhaustedError: it may need more cache than there is in all.
        """
        self._check(prompt_ids, params)
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
            self.lossless,
        )
        self._scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; what it has so far is its output."""
        self._scheduler.cancel(request)

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
