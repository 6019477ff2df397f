"""Body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from draftwise.errors import InvalidParameterError
from draftwise.params import MAX_LOGPROBS
from draftwise.serving.errors import grammar_errors_named
from draftwise.serving.schemas.body import Body, quoted, wrong
from draftwise.serving.schemas.common import IGNORED, Ignored, Sampling
from draftwise.serving.schemas.tools import MAX_TOOLS, Tool, ToolCall, ToolChoice
from draftwise.structured_outputs import StructuredOutputs

MAX_MESSAGES = 4096


class TextPart(BaseModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


def _content(value: Any) -> str | None:
    """Join the text parts of a message to one string, as chat templates expect."""
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
                f"must be 'text', the only supported type; got {quoted(part.get('type'))}",
                f"[{index}].type",
            )
        if not isinstance(part.get("text"), str):
            raise wrong(f"must be a string, got {quoted(part.get('text'))}", f"[{index}].text")
        texts.append(part["text"])
    return "".join(texts)


class Message(BaseModel):
    """A chat message; additional keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: Annotated[
        str | None,
        PlainValidator(_content, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    tool_calls: list[ToolCall] | None = Field(
        None,
        max_length=MAX_TOOLS,
        fail_fast=True,
        description="Tool calls of an earlier message of the model.",
    )
    tool_call_id: str | None = Field(
        None, description="Id of the tool call whose result this message contains."
    )

    def plain(self) -> dict[str, Any]:
        """The message as a dictionary for chat templates."""
        extra = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        if self.tool_calls:
            extra["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            extra["tool_call_id"] = self.tool_call_id
        return {**extra, "role": self.role, "content": self.content or ""}


class JsonSchema(Body):
    """A JSON schema that the answer must match."""

    model_config = ConfigDict(protected_namespaces=())

    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _deprecated(value: Any) -> None:
    """Reject function calling in the format that `tools` replaced; neutral values are accepted."""
    if value not in ([], {}, "none", "auto"):
        raise wrong("is deprecated; use tools and tool_choice")


Deprecated = Annotated[
    Any,
    PlainValidator(_deprecated, json_schema_input_type=Any),
    Field(description="Deprecated; must be empty. Use `tools`."),
]


class ChatBody(Sampling):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(
        None, ge=0, description="Default: the remaining length of the context."
    )
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Additional variables of the chat template."
    )
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice = Field(None, description="Default: `auto`.")
    parallel_tool_calls: bool = Field(
        True, description="If false, only the first tool call is returned."
    )
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None
    modalities: list[Literal["text"]] | None = Field(
        None, max_length=1, fail_fast=True, description=f'{IGNORED} Only `["text"]`.'
    )
    functions: Deprecated = None
    function_call: Deprecated = None

    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report per position; ``None`` for no logprobs."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidParameterError("top_logprobs", "requires logprobs: true")
            return None
        return self.top_logprobs or 0

    def grammar_field(self) -> str | None:
        """Field that defines the grammar; ``None`` for ``structured_outputs``."""
        response_format = self.response_format
        if response_format is None or response_format.type == "text":
            return None
        return "response_format"

    def grammar(self) -> StructuredOutputs | None:
        """Grammar of the answer; ``None`` for unconstrained text.

        Raises:
            InvalidParameterError: the grammar is invalid or given twice.
        """
        response_format = self.response_format
        if response_format is None or response_format.type == "text":
            return super().grammar()
        if self.structured_outputs is not None:
            raise InvalidParameterError(
                "structured_outputs", "cannot be combined with response_format; give one of them"
            )
        if response_format.type == "json_object":
            return StructuredOutputs(json_object=True)
        if response_format.json_schema is None:
            raise InvalidParameterError("response_format.json_schema", "is missing")
        with grammar_errors_named("response_format"):
            return StructuredOutputs(json_schema=response_format.json_schema.json_schema)
