"""Response bodies in OpenAI's formats, complete or in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from draftwise.outputs import FinishReason, SpeculationStats, TokenLogprobs, TokenSource
from draftwise.serving.generation import Generation
from draftwise.serving.messages import Piece
from draftwise.serving.token_texts import TokenTexts

Json = dict[str, Any]
_IMPOSSIBLE = -9999.0


@dataclass
class AccumulatedAnswer:
    """The pieces of one answer, accumulated.

    Attributes:
        texts: text of the answer, one item per token with the source of the token.
        token_ids: token ids of the answer.
        logprobs: log-probabilities of the tokens; ``None`` if they were not requested.
        finish_reason: why the answer ended.
        prompt_logprobs: log-probabilities of the prompt; ``None`` if they were not requested.
    """

    texts: list[tuple[str, TokenSource]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """Text of the answer."""
        return "".join(text for text, _ in self.texts)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.texts += piece.texts
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *piece.logprobs]
        self.finish_reason = piece.finish_reason
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs


class AnswerFormat(Protocol):
    """Interface of response formats. ``number`` is the index of an answer."""

    def opening(self, number: int) -> Json | None:
        """The chunk before the first token; ``None`` for no chunk."""

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """The chunk for a piece of an answer; ``None`` if the piece has nothing to send yet."""

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk, which contains token counts and no answer."""

    def whole(self, answers: Sequence[AccumulatedAnswer], usage: Json) -> Json:
        """The complete response body."""


class BaseFormat(ABC):
    """Base class of the formats of text and chat completions."""

    def __init__(
        self, kind: str, prefix: str, model: str, return_tokens: bool, token_texts: TokenTexts
    ) -> None:
        self._token_texts = token_texts
        self._envelope = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._return_tokens = return_tokens

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk, which contains token counts and no answer."""
        return {**self._envelope, "choices": [], "usage": usage}

    def _choice(
        self,
        number: int,
        content: Json,
        addition: Piece | AccumulatedAnswer | None,
    ) -> Json:
        """One choice of a body, or of a chunk; ``addition`` is ``None`` in opening chunks."""
        reason = None if addition is None else addition.finish_reason
        choice = {
            "index": number,
            **content,
            "logprobs": None,
            "finish_reason": None if reason is None else reason.value,
        }
        if addition is not None:
            choice["logprobs"] = self._logprobs(number, addition)
        if self._return_tokens:
            texts = [] if addition is None else addition.texts
            choice["tokens"] = [{"text": text, "source": source.value} for text, source in texts]
        return choice

    @abstractmethod
    def _logprobs(self, number: int, addition: Piece | AccumulatedAnswer) -> Json | None:
        """Log-probabilities in this format; ``None`` if they were not requested."""


def usage(generation: Generation) -> Json:
    """Token counts and, if all answers have ended, counts of speculative decoding."""
    num_prompt_tokens, progress = generation.num_prompt_tokens, generation.progress
    num_tokens = sum(each.num_tokens for each in progress)
    counts: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
    if all(each.finish_reason is not None for each in progress):
        total = SpeculationStats()
        for each in progress:
            total.add(each.stats)
        counts["speculation"] = {
            **asdict(total),
            "mean_accepted_length": total.mean_accepted_length,
            "acceptance_rate": total.acceptance_rate,
        }
        del counts["speculation"]["num_tokens"]
    return counts


def finite(logprob: float) -> float:
    """Replace -inf, which JSON cannot represent, by OpenAI's value for impossible tokens."""
    return max(logprob, _IMPOSSIBLE)
