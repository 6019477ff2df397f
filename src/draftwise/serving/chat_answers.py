"""Response format of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.outputs import FinishReason
from draftwise.serving.answers import AccumulatedAnswer, BaseFormat, Json, finite
from draftwise.serving.messages import Piece
from draftwise.serving.token_texts import TokenTexts
from draftwise.serving.tools.answer import ToolAnswer


class ChatFormat(BaseFormat):
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

    def whole(self, answers: Sequence[AccumulatedAnswer], usage: Json) -> Json:
        """The complete response body."""
        choices = []
        for number, answer in enumerate(answers):
            tools = self._tool_answers[number]
            content = {"content": answer.text} if tools is None else tools.message(answer.text)
            message = {"role": "assistant", **content, "refusal": None}
            choice = self._choice(number, {"message": message}, answer)
            choices.append(self._with_finish_reason(choice, tools))
        return {**self._envelope, "choices": choices, "usage": usage}

    def _with_finish_reason(self, choice: Json, tools: ToolAnswer | None) -> Json:
        """Set the finish reason of an answer that ends with tool calls."""
        if tools is not None and tools.num_calls and choice["finish_reason"] == FinishReason.STOP:
            choice["finish_reason"] = "tool_calls"
        return choice

    def _logprobs(self, number: int, addition: Piece | AccumulatedAnswer) -> Json | None:
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
