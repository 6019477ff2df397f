"""Answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.outputs import TokenLogprobs
from draftwise.serving.answers import BaseForm, Gathered, Json, finite
from draftwise.serving.messages import Piece
from draftwise.serving.token_texts import TokenTexts


@dataclass(frozen=True)
class Echo:
    """A prompt that is written before an answer.

    Attributes:
        text: of the prompt.
        token_ids: its tokens.
        waits: for their log-probabilities, which come with the answer's first piece.
    """

    text: str
    token_ids: Sequence[int]
    waits: bool


class CompletionForm(BaseForm):
    """Of `/v1/completions`."""

    def __init__(
        self,
        model: str,
        return_tokens: bool,
        token_texts: TokenTexts,
        echoes: Sequence[Echo | None],
    ) -> None:
        """Set up.

        Args:
            model: its name.
            return_tokens: say where each piece of text came from.
            token_texts: of the model.
            echoes: ``[answers]`` what stands before each answer, if anything does.
        """
        super().__init__("text_completion", "cmpl", model, return_tokens, token_texts)
        self._echoes = echoes
        self._offsets = [0 if echo is None else len(echo.text) for echo in echoes]

    def opening(self, number: int) -> Json | None:
        """The prompt, if it is to be written before the answer and waits for nothing."""
        echo = self._echoes[number]
        if echo is None or echo.waits:
            return None
        choice = self._choice(number, {"text": echo.text}, None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """What a step brought an answer."""
        echo, text = self._echoes[number], piece.text
        if echo is not None and piece.prompt_logprobs is not None:
            text = echo.text + text
        elif not (piece.texts or piece.logprobs or piece.finish_reason):
            return None  # a character or a possible stop string is not complete
        return {**self._envelope, "choices": [self._choice(number, {"text": text}, piece)]}

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""
        choices = []
        for number, answer in enumerate(answers):
            echo = self._echoes[number]
            text = answer.text if echo is None else echo.text + answer.text
            choices.append(self._choice(number, {"text": text}, answer))
        return {**self._envelope, "choices": choices, "usage": usage}

    def _logprobs(self, number: int, gained: Piece | Gathered) -> Json | None:
        """Columns: tokens, their log-probabilities, the likeliest, and where they begin."""
        if gained.logprobs is None:
            return None
        tokens, logprobs = list(gained.token_ids), list[TokenLogprobs | None](gained.logprobs)
        texts = [self._token_texts(token)[0] for token in tokens]
        offsets, self._offsets[number] = _offsets(texts, self._offsets[number])
        echo = self._echoes[number]
        if echo is not None and gained.prompt_logprobs is not None:
            tokens, logprobs = [*echo.token_ids, *tokens], [*gained.prompt_logprobs, *logprobs]
            before = [self._token_texts(token)[0] for token in echo.token_ids]
            texts, offsets = [*before, *texts], [*_places(before, echo.text), *offsets]
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
    """Where texts begin that stand one behind the other, and where the last ends."""
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return offsets, start


def _places(texts: Sequence[str], prompt: str) -> list[int]:
    """Where the texts of a prompt's tokens begin in it."""
    if not texts or prompt.startswith(texts[0]):
        return _offsets(texts, 0)[0]
    # The tokenizer has put a token before the text, which it is no part of.
    return [0, *_offsets(texts[1:], 0)[0]]
