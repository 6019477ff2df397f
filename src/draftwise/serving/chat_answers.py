"""Answers of chats."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.serving.answers import BaseForm, Gathered, Json, finite
from draftwise.serving.messages import Piece
from draftwise.serving.token_texts import TokenTexts


class ChatForm(BaseForm):
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

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """What a step brought an answer."""
        if not (piece.texts or piece.logprobs or piece.finish_reason):
            return None  # a character or a possible stop string is not complete
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

    def _logprobs(self, number: int, gained: Piece | Gathered) -> Json | None:
        """One entry for each token, with the likeliest beside it."""
        if gained.logprobs is None:
            return None

        def entry(token: int, logprob: float) -> Json:
            text, as_bytes = self._token_texts(token)
            return {"token": text, "logprob": finite(logprob), "bytes": as_bytes}

        return {
            "content": [
                entry(token, each.logprob) | {"top_logprobs": [entry(*top) for top in each.top]}
                for token, each in zip(gained.token_ids, gained.logprobs, strict=True)
            ],
            "refusal": None,
        }
