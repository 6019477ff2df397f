"""Bodies of `/tokenize`, `/detokenize` and `/v1/speculation`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from draftwise.chat_templates import ChatTemplateParams
from draftwise.errors import InvalidParameterError
from draftwise.serving.schemas.body import Body, TokenId, quoted, wrong
from draftwise.serving.schemas.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Message,
    Tool,
    ToolChoice,
    offered_tools,
)


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice = Field(
        None, description="With `none`, no tools are passed to the chat template."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Additional variables of the chat template."
    )

    def chat(self) -> ChatTemplateParams:
        """Parameters of the chat template."""
        return ChatTemplateParams(
            tools=offered_tools(self.tools, self.tool_choice), variables=self.chat_template_kwargs
        )


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)


def _lenience(value: Any) -> Any:
    """Check that a value is a number or an object of numbers; the engine checks their ranges."""
    for each in value.values() if isinstance(value, dict) else [value]:
        if isinstance(each, bool) or not isinstance(each, int | float):
            raise wrong(
                "must be a number, or an object that maps numbers of waiting requests to numbers; "
                f"got {quoted(each)}"
            )
    return value


class SpeculationChange(Body):
    """Body of `PATCH /v1/speculation`; omitted settings stay unchanged."""

    policy: str | None = None
    policy_options: dict[str, Any] | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=64)
    lenience: Annotated[
        float | dict[str, float] | None,
        PlainValidator(_lenience, json_schema_input_type=float | dict[str, float]),
    ] = Field(
        None,
        description="A number, or an object that maps numbers of waiting requests to the lenience "
        "that applies from there on.",
    )

    def changes(self) -> dict[str, Any]:
        """The settings to change.

        Raises:
            InvalidParameterError: there are none.
        """
        changes = {name: getattr(self, name) for name in sorted(self.model_fields_set)}
        if not changes:
            raise InvalidParameterError("speculation", "has no settings to change")
        return changes
