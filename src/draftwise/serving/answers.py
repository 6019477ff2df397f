"""Response bodies in OpenAI's formats, complete or in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from draftwise.outputs import FinishReason, SpeculationStats, TokenLogprobs
from draftwise.serving.acceptance import NONE, acceptance_metrics
from draftwise.serving.generation import Generation
from draftwise.serving.messages import Piece
from draftwise.serving.tokenizing import TokenTexts
from draftwise.serving.tools.tooling import ToolAnswer

Json = dict[str, Any]
_IMPOSSIBLE = -9999.0


class AnswerFormat(ABC):
    """Base class of the formats of text and chat completions; ``number`` counts the answers."""

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

    @abstractmethod
    def opening(self, number: int) -> Json | None:
        """The chunk before the first token; ``None`` for no chunk."""

    @abstractmethod
    def chunk(self, number: int, piece: Piece) -> Json | None:
        """The chunk for a piece of an answer; ``None`` if the piece has nothing to send yet."""

    @abstractmethod
    def _whole_choice(self, number: int, answer: Piece) -> Json:
        """The choice of a complete response body for a complete answer."""

    def whole(self, answers: Sequence[Piece], counts: Json) -> Json:
        """The complete response body, with token counts (:func:`counts`)."""
        choices = [self._whole_choice(number, answer) for number, answer in enumerate(answers)]
        return {**self._envelope, "choices": choices, **counts}

    def usage_chunk(self, counts: Json) -> Json:
        """The last chunk, which contains token counts and no answer."""
        return {**self._envelope, "choices": [], **counts}

    def _choice(
        self,
        number: int,
        content: Json,
        addition: Piece | None,
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
    def _logprobs(self, number: int, addition: Piece) -> Json | None:
        """Log-probabilities in this format; ``None`` if they were not requested."""


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of an answer as one."""
    logprobs = [each.logprobs for each in pieces if each.logprobs is not None]
    of_prompt = (each.prompt_logprobs for each in pieces if each.prompt_logprobs is not None)
    return replace(
        pieces[-1],
        token_ids=[token for each in pieces for token in each.token_ids],
        texts=[text for each in pieces for text in each.texts],
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=next(of_prompt, None),
    )


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


def counts(generation: Generation) -> Json:
    """Token counts, and if they are asked for, the acceptance of the drafts of a single answer."""
    found: Json = {"usage": usage(generation)}
    drafts = generation.progress[0].drafts
    level = generation.spec_decode_metrics
    if level != NONE and len(generation.specs) == 1 and drafts is not None:
        found["metrics"] = {"speculative_decoding": acceptance_metrics(drafts, level)}
    return found


def finite(logprob: float) -> float:
    """Replace -inf, which JSON cannot represent, by OpenAI's value for impossible tokens."""
    return max(logprob, _IMPOSSIBLE)


@dataclass(frozen=True)
class Echo:
    """A prompt that is returned before an answer.

    Attributes:
        text: text of the prompt.
        token_ids: token ids of the prompt.
        has_logprobs: whether log-probabilities of the prompt were requested; they arrive with the
            first piece of the answer.
    """

    text: str
    token_ids: Sequence[int]
    has_logprobs: bool


class CompletionFormat(AnswerFormat):
    """Response format of `/v1/completions`."""

    def __init__(
        self,
        model: str,
        return_tokens: bool,
        token_texts: TokenTexts,
        echoes: Sequence[Echo | None],
    ) -> None:
        """Create the format for one response.

        Args:
            model: name of the model.
            return_tokens: report the source of each token.
            token_texts: texts of the model's tokens.
            echoes: ``[answers]`` prompt to return before each answer, if any.
        """
        super().__init__("text_completion", "cmpl", model, return_tokens, token_texts)
        self._echoes = echoes
        self._offsets = [0 if echo is None else len(echo.text) for echo in echoes]

    def opening(self, number: int) -> Json | None:
        """The chunk with the echoed prompt, unless it has log-probabilities."""
        echo = self._echoes[number]
        if echo is None or echo.has_logprobs:
            return None
        choice = self._choice(number, {"text": echo.text}, None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """The chunk for a piece of an answer."""
        echo, text = self._echoes[number], piece.text
        if echo is not None and piece.prompt_logprobs is not None:
            text = echo.text + text
        elif not (piece.texts or piece.logprobs or piece.finish_reason):
            return None  # a character or a possible stop string is incomplete
        return {**self._envelope, "choices": [self._choice(number, {"text": text}, piece)]}

    def _whole_choice(self, number: int, answer: Piece) -> Json:
        echo = self._echoes[number]
        text = answer.text if echo is None else echo.text + answer.text
        return self._choice(number, {"text": text}, answer)

    def _logprobs(self, number: int, addition: Piece) -> Json | None:
        """Lists of tokens, their log-probabilities, the most likely tokens, and text offsets."""
        if addition.logprobs is None:
            return None
        tokens, logprobs = list(addition.token_ids), list[TokenLogprobs | None](addition.logprobs)
        texts = [self._token_texts(token)[0] for token in tokens]
        offsets, self._offsets[number] = _offsets(texts, self._offsets[number])
        echo = self._echoes[number]
        if echo is not None and addition.prompt_logprobs is not None:
            tokens, logprobs = [*echo.token_ids, *tokens], [*addition.prompt_logprobs, *logprobs]
            prompt = [self._token_texts(token)[0] for token in echo.token_ids]
            texts, offsets = [*prompt, *texts], [*_prompt_offsets(prompt, echo.text), *offsets]
        return {
            "tokens": texts,
            "token_logprobs": [each and finite(each.logprob) for each in logprobs],
            "top_logprobs": [
                each
                and {text: finite(each.logprob)}
                | {self._token_texts(token)[0]: finite(logprob) for token, logprob in each.top}
                for text, each in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


def _offsets(texts: Sequence[str], start: int) -> tuple[list[int], int]:
    """Offsets of consecutive texts, and the end of the last one."""
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return offsets, start


def _prompt_offsets(texts: Sequence[str], prompt: str) -> list[int]:
    """Offsets of the texts of a prompt's tokens within the prompt."""
    if not texts or prompt.startswith(texts[0]):
        return _offsets(texts, 0)[0]
    # The first token was added by the tokenizer and is not part of the text.
    return [0, *_offsets(texts[1:], 0)[0]]


class ChatFormat(AnswerFormat):
    """Response format of `/v1/chat/completions`."""

    def __init__(
        self,
        model: str,
        return_tokens: bool,
        token_texts: TokenTexts,
        stream: bool,
        has_service_tier: bool,
        tool_answers: Sequence[ToolAnswer | None],
    ) -> None:
        """Create the format for one response.

        Args:
            model: name of the model.
            return_tokens: report the source of each token.
            token_texts: texts of the model's tokens.
            stream: whether the response is sent in chunks.
            has_service_tier: whether the response names its service tier, which is always the same.
            tool_answers: ``[answers]`` parser of the tool calls of each answer, if any.
        """
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(kind, "chatcmpl", model, return_tokens, token_texts)
        if has_service_tier:
            self._envelope["service_tier"] = "default"
        self._tool_answers = tool_answers

    def opening(self, number: int) -> Json | None:
        """The chunk with the role of the message."""
        choice = self._choice(number, {"delta": {"role": "assistant", "content": ""}}, None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """The chunk for a piece of an answer."""
        tools = self._tool_answers[number]
        is_last = piece.finish_reason is not None
        if tools is None:
            delta: Json = {"content": piece.text}
            has_content = bool(piece.texts)
        else:
            delta = tools.delta(piece.text, is_last)
            has_content = bool(delta or (piece.texts and self._return_tokens))
        if not (has_content or piece.logprobs or is_last):
            return None  # a character, a possible stop string or a tool call is incomplete
        choice = self._choice(number, {"delta": delta}, piece)
        return {**self._envelope, "choices": [self._with_finish_reason(choice, tools)]}

    def _whole_choice(self, number: int, answer: Piece) -> Json:
        tools = self._tool_answers[number]
        content = {"content": answer.text} if tools is None else tools.message(answer.text)
        message = {"role": "assistant", **content, "refusal": None}
        choice = self._choice(number, {"message": message}, answer)
        return self._with_finish_reason(choice, tools)

    def _with_finish_reason(self, choice: Json, tools: ToolAnswer | None) -> Json:
        """Set the finish reason of an answer that ends with tool calls."""
        if tools is not None and tools.num_calls and choice["finish_reason"] == FinishReason.STOP:
            choice["finish_reason"] = "tool_calls"
        return choice

    def _logprobs(self, number: int, addition: Piece) -> Json | None:
        """One entry per token, with the most likely tokens at its position."""
        if addition.logprobs is None:
            return None

        def entry(token: int, logprob: float) -> Json:
            text, as_bytes = self._token_texts(token)
            return {"token": text, "logprob": finite(logprob), "bytes": as_bytes}

        return {
            "content": [
                entry(token, each.logprob) | {"top_logprobs": [entry(*top) for top in each.top]}
                for token, each in zip(addition.token_ids, addition.logprobs, strict=True)
            ],
            "refusal": None,
        }
