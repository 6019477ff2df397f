"""One request: its tokens, its limits, and what became of it."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

from draftwise.core.history import AcceptanceHistory
from draftwise.engine.matcher import Matcher
from draftwise.engine.text import TextBuilder
from draftwise.errors import DraftwiseError
from draftwise.outputs import (
    FinishReason,
    RequestOutput,
    SpeculationStats,
    TokenLogprobs,
    TokenSource,
)
from draftwise.params import RequestSpeculation, SamplingParams
from draftwise.policies.base import RequestState

NO_ROW = -1


class NewOutput(NamedTuple):
    """What a request gained since it was last asked.

    Attributes:
        token_ids: new tokens.
        sources: where each of them came from.
        texts: new text in pieces, each with where its token came from; a piece may be the rest of
            an earlier token, whose text was not certain before.
        logprobs: of the new tokens; ``None`` if they are not asked for.
        prompt_logprobs: of the prompt, once it was read, as in :class:`RequestOutput`.
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
    """State of a request from arrival to answer.

    Attributes:
        request_id: unique number.
        params: its sampling parameters.
        seed: of its random numbers.
        tokens: prompt and output so far.
        num_prompt_tokens: how many of them are the prompt.
        row: its row in every key-value cache, ``NO_ROW`` while it waits.
        finish_reason: ``None`` while it runs.
        error: why it failed, if it did.
        stats: how speculation goes.
        speculation: what it asks for itself.
        history: how its recent tokens fared.
        logprobs: one entry for each token of the output; none if they are not asked for.
        prompt_logprobs: one entry for each token of the prompt that was read, but the first; none
            if they are not asked for.
        matcher: knows what may come next; ``None`` if its text may have any form.
        stop_token_ids: tokens that end its text, from ``min_tokens`` on.
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
        self.row = NO_ROW
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
        self._sources: list[TokenSource] = []
        self._text = TextBuilder(tokenizer, prompt_ids, tuple(params.stop), params.min_tokens)
        self._num_reported = 0
        self._prompt_is_reported = False

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_masked(self) -> bool:
        """Whether some tokens may not come next."""
        # Asked of every request in every step: most have neither.
        if self.matcher is None and not self.params.min_tokens:
            return False
        return self.matcher is not None or self.must_go_on()

    def must_go_on(self, num_drafted: int = 0) -> bool:
        """Whether no token may end the text behind so many drafted tokens."""
        is_early = self.num_output_tokens + num_drafted < self.params.min_tokens
        return is_early and bool(self.stop_token_ids)

    def state(self, draft_limit: int) -> RequestState:
        """What a policy may know."""
        return RequestState(
            len(self.tokens),
            self.num_output_tokens,
            draft_limit,
            self.request_id,
            self.params.temperature == 0,
            self.history.mean,
            self.speculation.policy,
        )

    def draft_limit(self, draft_context: int) -> int:
        """Most tokens worth drafting: one of those left is the target's own."""
        room = min(self.max_total_tokens - len(self.tokens) - 1, draft_context - len(self.tokens))
        if not self.speculation.enabled:
            return 0
        if self.speculation.num_speculative_tokens is not None:
            room = min(room, self.speculation.num_speculative_tokens)
        return max(0, room)

    def append(
        self, token: int, source: TokenSource, logprobs: TokenLogprobs | None = None
    ) -> bool:
        """Take one more token; True if the request ends with it, or because it cannot come."""
        if not self.params.max_tokens:  # it only wants to know of its prompt
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
        """What came since the last call."""
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
        """The answer as the caller sees it."""
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
        )

    def _reviewed_prompt(self) -> list[TokenLogprobs | None] | None:
        """What the target thinks of the prompt, if that is asked for."""
        return None if self.params.prompt_logprobs is None else [None, *self.prompt_logprobs]
