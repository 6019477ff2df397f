"""Response format of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.outputs import TokenLogprobs
from draftwise.serving.answers import AccumulatedAnswer, BaseFormat, Json, finite
from draftwise.serving.messages import Piece
from draftwise.serving.token_texts import TokenTexts


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


class CompletionFormat(BaseFormat):
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

    def whole(self, answers: Sequence[AccumulatedAnswer], usage: Json) -> Json:
        """The complete response body."""
        choices = []
        for number, answer in enumerate(answers):
            echo = self._echoes[number]
            text = answer.text if echo is None else echo.text + answer.text
            choices.append(self._choice(number, {"text": text}, answer))
        return {**self._envelope, "choices": choices, "usage": usage}

    def _logprobs(self, number: int, addition: Piece | AccumulatedAnswer) -> Json | None:
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
