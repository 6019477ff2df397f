"""Body of `POST /v1/chat/completions`: messages, and tools with earlier calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, field_validator
from pydantic_core import from_json

from draftwise.chat_templates import content_error
from draftwise.errors import InvalidParameterError
from draftwise.params import MAX_LOGPROBS
from draftwise.serving.errors import grammar_errors_named
from draftwise.serving.schemas.body import Body, Neutral, quoted, wrong
from draftwise.serving.schemas.common import Ignored, Sampling
from draftwise.structured_outputs import StructuredOutputs

MAX_MESSAGES = 4096
MAX_TOOLS = 128
_MODES = ("none", "auto", "required")


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments, which are an object."
    )
    strict: bool | None = Field(
        None, description="Ignored: required calls always match the schema."
    )


class Tool(Body):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """The name of a function."""

    name: str


class NamedTool(BaseModel):
    """A tool choice that requires a call of one function."""

    type: Literal["function"]
    function: FunctionName


def _choice(value: Any) -> Any:
    if isinstance(value, str) and value in _MODES:
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value.get("type") != "function":
        raise wrong(
            "must be 'none', 'auto', 'required' or "
            f'{{"type": "function", "function": {{"name": "…"}}}}, got {quoted(value)}'
        )
    return {"type": "function", "function": {"name": name}}


ToolChoice = Annotated[
    Any,
    PlainValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
]


class CalledFunction(Body):
    """Name and arguments of an earlier function call."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str = Field("", description="Arguments as a JSON object; empty for none.")

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: str) -> str:
        try:
            parsed = from_json(value or "{}", allow_inf_nan=False)
        except ValueError as error:
            raise wrong(f"must be a JSON object as a string: {error}") from None
        if not isinstance(parsed, dict):
            raise wrong(f"must be a JSON object as a string, got {quoted(value)}")
        return value


class ToolCall(Body):
    """An earlier tool call of the model."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call as a dictionary for chat templates, with parsed arguments."""
        arguments = from_json(self.function.arguments or "{}", allow_inf_nan=False)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


def offered_tools(tools: Sequence[Tool], choice: Any) -> list[dict[str, Any]] | None:
    """The tools for the chat template; ``None`` if there are none or none may be called."""
    if not tools or choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in tools]


class TextPart(BaseModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A part of an earlier message in which a model declined to answer; its text is used."""

    type: Literal["refusal"]
    refusal: str


def _content(value: Any) -> str | list[dict[str, Any]] | None:
    """Check the content of a message. Refusals become text parts."""
    if isinstance(value, list):
        value = [_as_text_part(part) for part in value]
    error = content_error(value, quoted)
    if error is not None:
        raise wrong(error[1], error[0])
    content: str | list[dict[str, Any]] | None = value
    return content


def _as_text_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


class Message(Body):
    """A chat message; additional keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Annotated[
        str | list[dict[str, Any]] | None,
        PlainValidator(_content, json_schema_input_type=str | list[TextPart | RefusalPart] | None),
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
    refusal: str | None = Field(None, description="Used if there is no content.")
    audio: Annotated[None, Neutral("audio is not supported; send its text as content")] = None
    function_call: Annotated[
        None, Neutral("the deprecated form of calls is not supported; use tool_calls")
    ] = None

    def plain(self) -> dict[str, Any]:
        """The message as a dictionary for chat templates."""
        extra = dict(self.model_extra or {})
        if self.tool_calls:
            extra["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            extra["tool_call_id"] = self.tool_call_id
        return {**extra, "role": self.role, "content": self.content or self.refusal or ""}


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


Deprecated = Annotated[
    None,
    Neutral(
        "the deprecated form of tools is not supported; use tools and tool_choice",
        *([], {}, "none", "auto"),
    ),
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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(None, description="Passed to the chat template as a variable.")
    )
    prediction: Ignored = None
    functions: Deprecated = None
    function_call: Deprecated = None
    modalities: Annotated[
        None,
        Neutral('only text is generated; leave it out or set it to ["text"]', ["text"], []),
    ] = None
    audio: Annotated[None, Neutral("audio output is not supported; leave it out", {})] = None
    moderation: Annotated[None, Neutral("moderation is not supported; leave it out", {})] = None
    verbosity: Annotated[
        None,
        Neutral(
            "the length of answers is not controlled; leave it out or set it to medium, and ask "
            "for short or long answers in the messages",
            "medium",
        ),
    ] = None
    # OpenAI searches if the value is an empty object.
    web_search_options: Annotated[
        None, Neutral("web search is not supported, and {} asks for it too; leave it out")
    ] = None

    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report per position; ``None`` for no logprobs."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidParameterError("top_logprobs", "requires logprobs: true")
            return None
        return self.top_logprobs or 0

    def template_variables(self) -> dict[str, Any]:
        """Additional variables of the chat template."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        return {"reasoning_effort": self.reasoning_effort, **self.chat_template_kwargs}

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
