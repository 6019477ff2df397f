"""Tools in request bodies: functions, the tool choice, and earlier tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, field_validator
from pydantic_core import from_json

from draftwise.serving.schemas.body import Body, quoted, wrong

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
