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
    """

    texts: list[tuple[str, TokenSource]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None

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


class AnswerForm(Protocol):
    """How answers to one body are written."""

    def opening(self, number: int) -> Json | None:
        """A chunk before anything is said; ``None`` where there is none."""

    def chunk(self, number: int, piece: Piece) -> Json:
        """What a step brought an answer."""

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk, without an answer."""

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""


class _Form(ABC):
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
        if gained is not None and gained.logprobs is not None:
            choice["logprobs"] = self._logprobs(number, gained.token_ids, gained.logprobs)
        if self._return_tokens:
            texts = [] if gained is None else gained.texts
            choice["tokens"] = [{"text": text, "source": source.value} for text, source in texts]
        return choice

    @abstractmethod
    def _logprobs(
        self, number: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Json:
        """The target's log-probabilities in this form."""


class CompletionForm(_Form):
    """Of `/v1/completions`."""

    def __init__(
        self, model: str, return_tokens: bool, token_texts: TokenTexts, echoes: Sequence[str]
    ) -> None:
        """Set up.

        Args:
            model: its name.
            return_tokens: say where each piece of text came from.
            token_texts: of the model.
            echoes: ``[answers]`` what stands before each answer.
        """
        super().__init__("text_completion", "cmpl", model, return_tokens, token_texts)
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]

    def opening(self, number: int) -> Json | None:
        """The prompt, if it is to be written before the answer."""
        if not self._echoes[number]:
            return None
        choice = self._choice(number, {"text": self._echoes[number]}, None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json:
        """What a step brought an answer."""
        choice = self._choice(number, {"text": piece.text}, piece)
        return {**self._envelope, "choices": [choice]}

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""
        choices = [
            self._choice(number, {"text": self._echoes[number] + answer.text}, answer)
            for number, answer in enumerate(answers)
        ]
        return {**self._envelope, "choices": choices, "usage": usage}

    def _logprobs(
        self, number: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Json:
        """Columns: tokens, their log-probabilities, the likeliest, and where they begin."""
        texts = [self._token_texts(token)[0] for token in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": [
                {text: _finite(each.logprob)}
                | {self._token_texts(token)[0]: _finite(logprob) for token, logprob in each.top}
                for text, each in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


class ChatForm(_Form):
    """Of `/v1/chat/completions`."""

    def __init__(
        self, model: str, return_tokens: bool, token_texts: TokenTexts, stream: bool
    ) -> None:
        """Set up.

        Args:
            model: its name.
            return_tokens: say where each piece of text came from.
            token_texts: of the model.
            stream: in chunks.
        """
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(kind, "chatcmpl", model, return_tokens, token_texts)

    def opening(self, number: int) -> Json | None:
        """Who speaks."""
        choice = self._choice(number, {"delta": {"role": "assistant", "content": ""}}, None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json:
        """What a step brought an answer."""
        content = {"delta": {"content": piece.text}}
        choice = self._choice(number, content, piece)
        return {**self._envelope, "choices": [choice]}

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""
        choices = [
            self._choice(
                number,
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}},
                answer,
            )
            for number, answer in enumerate(answers)
        ]
        return {**self._envelope, "choices": choices, "usage": usage}

    def _logprobs(
        self, number: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> Json:
        """One entry for each token, with the likeliest beside it."""

        def entry(token: int, logprob: float) -> Json:
            text, as_bytes = self._token_texts(token)
            return {"token": text, "logprob": _finite(logprob), "bytes": as_bytes}

        return {
            "content": [
                entry(token, each.logprob) | {"top_logprobs": [entry(*top) for top in each.top]}
                for token, each in zip(token_ids, logprobs, strict=True)
            ],
            "refusal": None,
        }


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


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's number for what is as good as impossible."""
    return max(logprob, _IMPOSSIBLE)
