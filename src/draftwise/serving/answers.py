"""Answers in OpenAI's forms: whole, or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from draftwise.outputs import FinishReason, SpeculationStats, TokenSource
from draftwise.serving.generation import Progress
from draftwise.serving.messages import Piece

Json = dict[str, Any]


@dataclass
class Gathered:
    """One answer as it comes together.

    Attributes:
        texts: its text in pieces, each with where its token came from.
        finish_reason: why it ended.
    """

    texts: list[tuple[str, TokenSource]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for text, _ in self.texts)

    def add(self, piece: Piece) -> None:
        """Take what a step brought."""
        self.texts += piece.texts
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


class _Form:
    """What both forms share."""

    def __init__(self, kind: str, prefix: str, model: str, return_tokens: bool) -> None:
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
        texts: list[tuple[str, TokenSource]],
        reason: FinishReason | None,
    ) -> Json:
        choice = {
            "index": number,
            **content,
            "logprobs": None,
            "finish_reason": None if reason is None else reason.value,
        }
        if self._return_tokens:
            choice["tokens"] = [{"text": text, "source": source.value} for text, source in texts]
        return choice


class CompletionForm(_Form):
    """Of `/v1/completions`."""

    def __init__(self, model: str, return_tokens: bool, echoes: Sequence[str]) -> None:
        """Set up.

        Args:
            model: its name.
            return_tokens: say where each piece of text came from.
            echoes: ``[answers]`` what stands before each answer.
        """
        super().__init__("text_completion", "cmpl", model, return_tokens)
        self._echoes = echoes

    def opening(self, number: int) -> Json | None:
        """The prompt, if it is to be written before the answer."""
        if not self._echoes[number]:
            return None
        choice = self._choice(number, {"text": self._echoes[number]}, [], None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json:
        """What a step brought an answer."""
        choice = self._choice(number, {"text": piece.text}, piece.texts, piece.finish_reason)
        return {**self._envelope, "choices": [choice]}

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""
        choices = [
            self._choice(
                number,
                {"text": self._echoes[number] + answer.text},
                answer.texts,
                answer.finish_reason,
            )
            for number, answer in enumerate(answers)
        ]
        return {**self._envelope, "choices": choices, "usage": usage}


class ChatForm(_Form):
    """Of `/v1/chat/completions`."""

    def __init__(self, model: str, return_tokens: bool, stream: bool) -> None:
        """Set up.

        Args:
            model: its name.
            return_tokens: say where each piece of text came from.
            stream: in chunks.
        """
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(kind, "chatcmpl", model, return_tokens)

    def opening(self, number: int) -> Json | None:
        """Who speaks."""
        choice = self._choice(number, {"delta": {"role": "assistant", "content": ""}}, [], None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json:
        """What a step brought an answer."""
        content = {"delta": {"content": piece.text}}
        choice = self._choice(number, content, piece.texts, piece.finish_reason)
        return {**self._envelope, "choices": [choice]}

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""
        choices = [
            self._choice(
                number,
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}},
                answer.texts,
                answer.finish_reason,
            )
            for number, answer in enumerate(answers)
        ]
        return {**self._envelope, "choices": choices, "usage": usage}


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
