"""One request: its parameters, its tokens, its limits and its output."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

from draftwise.engine.matcher import Matcher
from draftwise.engine.text import TextBuilder
from draftwise.errors import DraftwiseError, InvalidParameterError, PromptError
from draftwise.outputs import (
    FinishReason,
    RequestOutput,
    SpeculationStats,
    TokenLogprobs,
    TokenSource,
)
from draftwise.params import SamplingParams
from draftwise.policies.inputs import AcceptanceHistory, RequestState
from draftwise.speculation import RequestSpeculation

NO_CACHE_SLOT = -1


class NewOutput(NamedTuple):
    """The new output of a request since the last call.

    Attributes:
        token_ids: new tokens.
        sources: the source of each new token.
        texts: new text in pieces, each with the source of its token. A piece may be the rest of an
            earlier token's text that was held back before.
        logprobs: log-probabilities of the new tokens; ``None`` if not requested.
        prompt_logprobs: log-probabilities of the prompt, once it was processed, as in
            :class:`RequestOutput`.
    """

    token_ids: list[int]
    sources: list[TokenSource]
    texts: list[tuple[str, TokenSource]]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """All new text."""
        return "".join(text for text, _ in self.texts)


class Request:
    """State of a request from arrival to completion.

    Attributes:
        request_id: unique number.
        params: its sampling parameters.
        seed: seed of its random numbers.
        tokens: prompt and output so far.
        num_prompt_tokens: number of prompt tokens among them.
        cache_slot: its slot in every key-value cache; ``NO_CACHE_SLOT`` while it waits.
        finish_reason: ``None`` while it runs.
        error: why it failed, if it did.
        stats: its speculation statistics.
        speculation: its own speculation settings.
        history: acceptance of its recent tokens.
        logprobs: one entry for each output token; empty if not requested.
        prompt_logprobs: one entry for each processed prompt token except the first; empty if not
            requested.
        matcher: restricts the next token by a grammar; ``None`` without a grammar.
        stop_token_ids: tokens that end its text once it has ``min_tokens`` tokens.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Any,
        stop_token_ids: frozenset[int],
        max_model_len: int,
        speculation: RequestSpeculation,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.tokens = list(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.cache_slot = NO_CACHE_SLOT
        self.finish_reason: FinishReason | None = None
        self.error: DraftwiseError | None = None
        self.stats = SpeculationStats()
        self.speculation = speculation
        self.history = AcceptanceHistory()
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.matcher = matcher
        self.max_total_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        self._prompt = prompt
        self.stop_token_ids = stop_token_ids
        self.num_cached_tokens = 0
        self._sources: list[TokenSource] = []
        self._text = TextBuilder(tokenizer, prompt_ids, tuple(params.stop), params.min_tokens)
        self._num_reported = 0
        self._prompt_is_reported = False

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_masked(self) -> bool:
        """Whether the next token is restricted."""
        # Called for every request in every step, and most requests have no restriction.
        if self.matcher is None and not self.params.min_tokens:
            return False
        return self.matcher is not None or self.must_continue()

    def must_continue(self, num_drafted: int = 0) -> bool:
        """Whether ``min_tokens`` forbids the text to end after ``num_drafted`` more tokens."""
        is_early = self.num_output_tokens + num_drafted < self.params.min_tokens
        return is_early and bool(self.stop_token_ids)

    def state(
        self, draft_limit: int, in_closed_batch: bool = False, has_model: bool = True
    ) -> RequestState:
        """The state of the request that a policy sees.

        Args:
            draft_limit: maximum draft length.
            in_closed_batch: whether no other request is expected before its batch has ended.
            has_model: whether a draft model can draft for it.
        """
        return RequestState(
            len(self.tokens),
            self.num_output_tokens,
            draft_limit,
            self.request_id,
            self.params.temperature == 0,
            self.history.mean,
            self.speculation.policy,
            has_model=has_model,
            num_left=self.max_total_tokens - len(self.tokens) if in_closed_batch else None,
        )

    def draft_limit(self, room: int) -> int:
        """The maximum draft length. One of the remaining tokens always comes from the target.

        Args:
            room: the maximum number of tokens that the proposer can propose.
        """
        room = min(self.max_total_tokens - len(self.tokens) - 1, room)
        if not self.speculation.enabled:
            return 0
        if self.speculation.num_speculative_tokens is not None:
            room = min(room, self.speculation.num_speculative_tokens)
        return max(0, room)

    def append(
        self, token: int, source: TokenSource, logprobs: TokenLogprobs | None = None
    ) -> bool:
        """Append a token. Returns True if the request ends or the grammar forbids the token."""
        if not self.params.max_tokens:  # the request only wants prompt log-probabilities
            self.finish(FinishReason.LENGTH)
            return True
        if self.matcher is not None and not self.matcher.take(token):
            self.finish(FinishReason.ERROR, self.matcher.error)
            return True
        self.tokens.append(token)
        self._sources.append(source)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.stats.num_tokens += 1
        if token in self.stop_token_ids:
            self._text.add_silent(token)
            self.finish(FinishReason.STOP)
        elif self._text.add(token) or (self.matcher is not None and self.matcher.is_complete):
            self.finish(FinishReason.STOP)
        elif len(self.tokens) >= self.max_total_tokens:
            self.finish(FinishReason.LENGTH)
        return self.finish_reason is not None

    def finish(self, reason: FinishReason, error: DraftwiseError | None = None) -> None:
        """End the request."""
        self.finish_reason = reason
        self.error = error
        self._text.finish()

    def take_new(self) -> NewOutput:
        """The output since the last call."""
        sources = self._sources[self._num_reported :]
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = self.logprobs[self._num_reported :]
        tokens = self.tokens[self.num_prompt_tokens + self._num_reported :]
        self._num_reported += len(tokens)
        texts = [(text, self._sources[index]) for index, text in self._text.release()]
        reviewed = None
        if not self._prompt_is_reported and (self.num_output_tokens or self.finish_reason):
            reviewed, self._prompt_is_reported = self._reviewed_prompt(), True
        return NewOutput(tokens, sources, texts, logprobs, reviewed)

    def output(self) -> RequestOutput:
        """The output in the form that the caller gets."""
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=self.tokens[: self.num_prompt_tokens],
            text=self._text.text,
            token_ids=self.tokens[self.num_prompt_tokens :],
            token_sources=list(self._sources),
            token_texts=list(self._text.pieces),
            finish_reason=self.finish_reason or FinishReason.CANCELLED,
            speculation=self.stats,
            error=self.error,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            prompt_logprobs=self._reviewed_prompt(),
            num_cached_tokens=self.num_cached_tokens,
        )

    def _reviewed_prompt(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt; ``None`` if not requested."""
        return None if self.params.prompt_logprobs is None else [None, *self.prompt_logprobs]


def check_prompt(prompt_ids: list[int], max_model_len: int, vocab_size: int) -> None:
    """Raise an error for a prompt that cannot be continued.

    Args:
        prompt_ids: its tokens.
        max_model_len: maximum length of prompt and output together, in tokens.
        vocab_size: the target's vocabulary size.

    Raises:
        PromptError: the prompt is empty, too long, or has tokens outside the vocabulary.
    """
    if not prompt_ids:
        raise PromptError("prompt", "is empty; give at least one token")
    if len(prompt_ids) >= max_model_len:
        raise PromptError(
            "prompt",
            f"has {len(prompt_ids)} tokens and the context holds {max_model_len} with at "
            "least one generated token; shorten it or raise max_model_len",
        )
    for token in prompt_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError("prompt", f"token ids must be integers, got {token!r}")
        if not 0 <= token < vocab_size:
            raise PromptError("prompt", f"token {token} is outside the vocabulary of {vocab_size}")


def check_params(params: SamplingParams, vocab_size: int, has_tokenizer: bool) -> None:
    """Raise an error for sampling parameters that do not apply to this target.

    Args:
        params: the request's parameters.
        vocab_size: the target's vocabulary size.
        has_tokenizer: whether the target has a tokenizer.

    Raises:
        InvalidParameterError: a token is outside the vocabulary, or ``stop`` is used without a
            tokenizer.
    """
    for name, tokens in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in tokens:
            if token >= vocab_size:
                raise InvalidParameterError(
                    name, f"token {token} is outside the vocabulary of {vocab_size}"
                )
    if params.stop and not has_tokenizer:
        raise InvalidParameterError(
            "stop", "the target has no tokenizer; use stop_token_ids instead"
        )
