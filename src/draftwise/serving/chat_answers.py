"""Answers of chats."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.outputs import FinishReason
from draftwise.serving.answers import BaseForm, Gathered, Json, finite
from draftwise.serving.messages import Piece
from draftwise.serving.token_texts import TokenTexts
from draftwise.serving.tools.answer import ToolAnswer


class ChatForm(BaseForm):
    """Of `/v1/chat/completions`."""

    def __init__(
        self,
        model: str,
        return_tokens: bool,
        token_texts: TokenTexts,
        stream: bool,
        tool_answers: Sequence[ToolAnswer | None],
    ) -> None:
        """Set up.

        Args:
            model: its name.
            return_tokens: say where each piece of text came from.
            token_texts: of the model.
            stream: in chunks.
            tool_answers: ``[answers]`` what tells calls of tools from text.
        """
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(kind, "chatcmpl", model, return_tokens, token_texts)
        self._tool_answers = tool_answers

    def opening(self, number: int) -> Json | None:
        """Who speaks."""
        choice = self._choice(number, {"delta": {"role": "assistant", "content": ""}}, None)
        return {**self._envelope, "choices": [choice]}

    def chunk(self, number: int, piece: Piece) -> Json | None:
        """What a step brought an answer."""
        tools = self._tool_answers[number]
        is_last = piece.finish_reason is not None
        if tools is None:
            delta: Json = {"content": piece.text}
            is_told = bool(piece.texts)
        else:
            delta = tools.delta(piece.text, is_last)
            is_told = bool(delta or (piece.texts and self._return_tokens))
        if not (is_told or piece.logprobs or is_last):
            return None  # a character, a possible stop string or a call is not complete
        choice = self._choice(number, {"delta": delta}, piece)
        return {**self._envelope, "choices": [self._called(choice, tools)]}

    def whole(self, answers: Sequence[Gathered], usage: Json) -> Json:
        """All answers at once."""
        choices = []
        for number, answer in enumerate(answers):
            tools = self._tool_answers[number]
            said = {"content": answer.text} if tools is None else tools.message(answer.text)
            message = {"role": "assistant", **said, "refusal": None}
            choice = self._choice(number, {"message": message}, answer)
            choices.append(self._called(choice, tools))
        return {**self._envelope, "choices": choices, "usage": usage}

    def _called(self, choice: Json, tools: ToolAnswer | None) -> Json:
        """An answer that ends with calls says so."""
        if tools is not None and tools.num_calls and choice["finish_reason"] == FinishReason.STOP:
            choice["finish_reason"] = "tool_calls"
        return choice

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
