"""Bodies of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from draftwise.errors import InvalidParameterError
from draftwise.params import MAX_LOGPROBS
from draftwise.serving.schemas.body import Body, quoted, wrong
from draftwise.serving.schemas.common import IGNORED, Ignored, Sampling
from draftwise.serving.schemas.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice
from draftwise.structured_outputs import StructuredOutputs

MAX_MESSAGES = 4096


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _content(value: Any) -> str | None:
    """The text of a message in one piece, as templates want it."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(f"must be a string or a list of text parts, got {quoted(value)}")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise wrong(
                f'must be a part such as {{"type": "text", "text": "…"}}, got {quoted(part)}',
                f"[{index}]",
            )
        if part.get("type") != "text":
            raise wrong(
                f"must be 'text', the only kind of part accepted; got {quoted(part.get('type'))}",
                f"[{index}].type",
            )
        if not isinstance(part.get("text"), str):
            raise wrong(f"must be a string, got {quoted(part.get('text'))}", f"[{index}].text")
        texts.append(part["text"])
    return "".join(texts)


class Message(BaseModel):
    """A message of a chat; what else it holds is the template's business."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: Annotated[
        str | None,
        PlainValidator(_content, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    tool_calls: list[ToolCall] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Made by the model before."
    )
    tool_call_id: str | None = Field(None, description="Of the call that this is the result of.")

    def plain(self) -> dict[str, Any]:
        """As templates want it."""
        told = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        if self.tool_calls:
            told["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        return {**told, "role": self.role, "content": self.content or ""}


class JsonSchema(Body):
    """A schema that the answer follows."""

    model_config = ConfigDict(protected_namespaces=())

    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _nothing(value: Any) -> None:
    """Refuse the form of function calls that `tools` replaced, unless nothing is asked for."""
    if value not in ([], {}, "none", "auto"):
        raise wrong("is the deprecated form of function calling; use tools and tool_choice")


Deprecated = Annotated[
    Any,
    PlainValidator(_nothing, json_schema_input_type=Any),
    Field(description="Deprecated; only empty, use `tools`."),
]


class ChatBody(Sampling):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=0, description="Without it, what the context holds.")
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further variables of the chat template."
    )
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice = Field(None, description="`auto` unless it is given.")
    parallel_tool_calls: bool = Field(True, description="False keeps the first call only.")
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None
    modalities: list[Literal["text"]] | None = Field(
        None, max_length=1, fail_fast=True, description=f'{IGNORED} Only `["text"]`.'
    )
    functions: Deprecated = None
    function_call: Deprecated = None

    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside each one; ``None`` for no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidParameterError("top_logprobs", "needs logprobs: true")
            return None
        return self.top_logprobs or 0

    def form_field(self) -> str | None:
        """Which field says what form the answer has; ``None`` for ``structured_outputs``."""
        wanted = self.response_format
        return None if wanted is None or wanted.type == "text" else "response_format"

    def form(self) -> StructuredOutputs | None:
        """What form the answer has.

        Raises:
            InvalidParameterError: it is given wrongly.
        """
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return super().form()
        if self.structured_outputs is not None:
            raise InvalidParameterError(
                "structured_outputs", "says the same as response_format; give one of them"
            )
        if wanted.type == "json_object":
            return StructuredOutputs(json_object=True)
        if wanted.json_schema is None:
            raise InvalidParameterError("response_format.json_schema", "is missing")
        return StructuredOutputs(json_schema=wanted.json_schema.json_schema)
