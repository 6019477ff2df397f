"""What a caller gets back."""

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
    """Where a token came from.

    ``DRAFT`` was drafted and accepted; ``CORRECTION`` replaced a rejected token; ``BONUS`` followed
    a fully accepted draft; ``TARGET`` came from a step that verified nothing.
    """

    DRAFT = "draft"
    CORRECTION = "correction"
    BONUS = "bonus"
    TARGET = "target"


@dataclass(frozen=True)
class TokenLogprobs:
    """What the target thought of one token, by the softmax of its own logits.

    Bias, penalties, temperature, filters and structures have no part in it.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the most likely token of the vocabulary; tokens as likely share a rank.
        top: the most likely tokens and their log-probabilities, the most likely first; as many as
            were asked for.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass
class SpeculationStats:
    """How speculation went for one request.

    Attributes:
        lossless: the output has exactly the target's distribution.
        num_steps: target passes that gave the request tokens.
        num_drafted: tokens drafted.
        num_judged: drafted tokens that a companion was asked about.
        num_verified: drafted tokens that the target checked.
        num_accepted: drafted tokens that it kept.
        num_tokens: tokens generated.
    """

    lossless: bool = True
    num_steps: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_judged: int = 0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens gained per step, the corrected or bonus token included; 0 before any step."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified tokens that was accepted; 0 if none was verified."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0

    def add(self, other: SpeculationStats) -> None:
        """Add another request's counts to these."""
        self.lossless = self.lossless and other.lossless
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_verified += other.num_verified
        self.num_accepted += other.num_accepted
        self.num_tokens += other.num_tokens
        self.num_judged += other.num_judged


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
        prompt: the prompt as text, ``None`` if token ids were given.
        prompt_token_ids: the prompt as tokens.
        text: the generated text, without special tokens, cut before a stop string.
        token_ids: the generated tokens, the one that ended the text included.
        token_sources: where each of them came from.
        token_texts: the piece of text that each token added; joined they are ``text``.
        finish_reason: why it ended.
        speculation: how speculation went.
        error: what went wrong, if ``finish_reason`` is ``"error"``.
        logprobs: one entry for each of ``token_ids``; ``None`` if they were not asked for.
        prompt_logprobs: one entry for each of ``prompt_token_ids``, ``None`` for the first, which
            nothing comes before; ``None`` if they were not asked for.
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

    @classmethod
    def empty(
        cls, prompt: object, finish_reason: FinishReason, error: DraftwiseError | None = None
    ) -> RequestOutput:
        """The output of a prompt for which nothing was generated.

        Args:
            prompt: as the caller gave it; kept if it is text.
            finish_reason: why nothing was generated.
            error: what went wrong, if it did.
        """
        text = prompt if isinstance(prompt, str) else None
        return cls(text, [], "", [], [], [], finish_reason, SpeculationStats(), error)


@dataclass(frozen=True)
class StreamPiece:
    """What one step added to one request.

    Attributes:
        index: which prompt it belongs to.
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        finish_reason: set in the last piece of a request.
        error: what went wrong, if it did.
        token_sources: where each of the new tokens came from.
        logprobs: one entry for each of ``token_ids``; ``None`` if they were not asked for.
    """

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: DraftwiseError | None = None
    token_sources: list[TokenSource] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
