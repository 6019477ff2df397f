"""Answers in OpenAI's forms: whole, or in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from draftwise.outputs import FinishReason, SpeculationStats, TokenLogprobs, TokenSource
from draftwise.serving.generation import Progress
from draftwise.serving.messages import Piece
from draftwise.serving.token_texts import TokenTexts

Json = dict[str, Any]
_IMPOSSIBLE = -9999.0


@dataclass
class Gathered:
    """One answer as it comes together.

    Attributes:
        texts: its text in pieces, each with where its token came from.
        token_ids: its tokens.
        logprobs: of its tokens; ``None`` if they are not asked for.
        finish_reason: why it ended.
        prompt_logprobs: of its prompt; ``None`` if they are not asked for.
    """

    texts: list[tuple[str, TokenSource]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for text, _ in self.texts)

    def add(self, piece: Piece) -> None:
        """Take what a step brought."""
        self.texts += piece.texts
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *piece.logprobs]
        self.finish_reason = piece.finish_reason
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs


class AnswerForm(Protocol):
    """How answers to one body are written."""

    def opening(self, number: int) -> Json | None:
        """A chunk before anything is said; ``None`` where there is none."""

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """What a step brought an answer; ``None`` where nothing can be said of it yet."""

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk, without an answer."""

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""


class BaseForm(ABC):
    """What both forms share."""

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
        """The last chunk, without an answer."""
        return {**self._envelope, "choices": [], "usage": usage}

    def _choice(
        self,
        number: int,
        content: Json,
        gained: Piece | Gathered | None,
    ) -> Json:
        """One answer, or what a piece adds to it; ``None`` for what comes before any token."""
        reason = None if gained is None else gained.finish_reason
        choice = {
            "index": number,
            **content,
            "logprobs": None,
            "finish_reason": None if reason is None else reason.value,
        }
        if gained is not None:
            choice["logprobs"] = self._logprobs(number, gained)
        if self._return_tokens:
            texts = [] if gained is None else gained.texts
            choice["tokens"] = [{"text": text, "source": source.value} for text, source in texts]
        return choice

    @abstractmethod
    def _logprobs(self, number: int, gained: Piece | Gathered) -> Json | None:
        """The target's log-probabilities in this form; ``None`` if they are not asked for."""


def usage(num_prompt_tokens: int, progress: Sequence[Progress]) -> Json:
    """How many tokens it took, and what speculation did.

    Args:
        num_prompt_tokens: over all prompts.
        progress: of each answer.
    """
    num_tokens = sum(each.num_tokens for each in progress)
    counts: Json = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
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
    """JSON has no infinity; OpenAI's number for what is as good as impossible."""
    return max(logprob, _IMPOSSIBLE)
