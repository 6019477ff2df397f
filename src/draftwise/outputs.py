"""Outputs of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from draftwise.errors import DraftwiseError


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenSource(StrEnum):
    """How a token was generated.

    ``DRAFT`` was drafted by a model and accepted; ``COPY`` was copied from an earlier text and
    accepted; ``CORRECTION`` replaced a rejected token; ``BONUS`` followed a fully accepted draft;
    ``TARGET`` was sampled in a step that verified no draft.
    """

    DRAFT = "draft"
    COPY = "copy"
    CORRECTION = "correction"
    BONUS = "bonus"
    TARGET = "target"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the target at one position.

    They are the log-softmax of the raw logits, before logit bias, penalties, temperature, filters
    and grammars.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: rank of the token in the vocabulary, 1 for the most likely token; equally likely
            tokens share a rank.
        top: the requested number of most likely tokens with their log-probabilities, in descending
            order.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass
class SpeculationStats:
    """Counts of speculative decoding for one request, or summed over requests.

    Attributes:
        lossless: whether the output has exactly the target's distribution.
        num_steps: number of target passes that generated tokens for the request.
        num_drafted: number of drafted tokens.
        num_scored: number of drafted tokens scored by the companion.
        num_verified: number of drafted tokens verified by the target.
        num_accepted: number of drafted tokens accepted by the target.
        num_tokens: number of generated tokens.
        seconds_saved: what the tokens would have taken without drafts, less what they took, by the
            guard's estimates of step times; negative if drafts cost time, ``None`` if steps without
            drafts were not measured.
    """

    lossless: bool = True
    num_steps: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_scored: int = 0
    seconds_saved: float | None = field(default=0.0, compare=False)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens generated per step, including the correction or bonus token; 0 without steps."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the verified tokens that was accepted; 0 if none was verified."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of another request."""
        self.lossless = self.lossless and other.lossless
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_verified += other.num_verified
        self.num_accepted += other.num_accepted
        self.num_tokens += other.num_tokens
        self.num_scored += other.num_scored
        self.add_saved(other.seconds_saved)

    def add_saved(self, seconds: float | None) -> None:
        """Add what drafts saved in a step; ``None`` if it is not known."""
        if self.seconds_saved is None or seconds is None:
            self.seconds_saved = None
        else:
            self.seconds_saved += seconds


@dataclass(frozen=True)
class RequestOutput:
    """The output for one prompt.

    Attributes:
        prompt: text of the prompt; ``None`` if token ids were given.
        prompt_token_ids: token ids of the prompt.
        text: generated text, without special tokens, cut before a stop string.
        token_ids: generated token ids, including the token that ended the text.
        token_sources: how each generated token was generated.
        token_texts: text added by each generated token; concatenated they are ``text``.
        finish_reason: why generation ended.
        speculation: counts of speculative decoding.
        error: the error, if ``finish_reason`` is ``"error"``.
        logprobs: one entry per generated token; ``None`` if log-probabilities were not requested.
        prompt_logprobs: one entry per prompt token, where the entry of the first token is ``None``;
            ``None`` if they were not requested.
        num_cached_tokens: number of prompt tokens that were found in the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    token_sources: list[TokenSource]
    token_texts: list[str]
    finish_reason: FinishReason
    speculation: SpeculationStats
    error: DraftwiseError | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def empty(
        cls, prompt: object, finish_reason: FinishReason, error: DraftwiseError | None = None
    ) -> RequestOutput:
        """Create the output of a prompt for which no token was generated.

        Args:
            prompt: prompt as given by the caller; kept if it is text.
            finish_reason: why nothing was generated.
            error: the error, if there was one.
        """
        text = prompt if isinstance(prompt, str) else None
        return cls(text, [], "", [], [], [], finish_reason, SpeculationStats(), error)


@dataclass(frozen=True)
class StreamPiece:
    """Tokens and text that one step generated for one request.

    Attributes:
        index: index of the prompt.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new token ids.
        finish_reason: set in the last piece of a request.
        error: the error, if the request failed.
        token_sources: how each new token was generated.
        logprobs: one entry per new token; ``None`` if log-probabilities were not requested.
    """

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: DraftwiseError | None = None
    token_sources: list[TokenSource] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
