"""What a chat's tools mean for its prompt, for the form of its answer and for reading it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.serving.schemas import ChatBody
from draftwise.serving.schemas.tools import offered_tools
from draftwise.serving.tools.answer import ToolAnswer
from draftwise.serving.tools.constrained import (
    CallListReader,
    NamedCallReader,
    arguments_schema,
    calls_schema,
)
from draftwise.serving.tools.events import ToolReader
from draftwise.serving.tools.registry import PARSERS
from draftwise.structured_outputs import StructuredOutputs


@dataclass(frozen=True)
class Tooling:
    """What a chat's tools mean.

    Attributes:
        tools: what the template is told; ``None`` for nothing.
        form: of the answer, where it must be a call.
        new_reader: of one answer; ``None`` if all of it is text.
        parallel: an answer may have several calls.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    form: StructuredOutputs | None = None
    new_reader: Callable[[], ToolReader] | None = None
    parallel: bool = True

    def new_answer(self) -> ToolAnswer | None:
        """What reads one answer; ``None`` if all of it is text."""
        return None if self.new_reader is None else ToolAnswer(self.new_reader(), self.parallel)


def prepare(body: ChatBody, parser: str | None) -> Tooling:
    """What a chat's tools mean.

    Args:
        body: of the request.
        parser: of calls that the model makes of its own accord; ``None`` if its form of calls is
            not known.

    Raises:
        InvalidParameterError: the choice is about tools that are not there, or the answer would
            have to have two forms.
    """
    functions = {}
    for number, tool in enumerate(body.tools):
        if tool.function.name in functions:
            raise InvalidParameterError(
                f"tools[{number}].function.name", f"{tool.function.name!r} is there twice"
            )
        functions[tool.function.name] = tool.function.parameters
    choice = body.tool_choice
    if choice == "none" or (not functions and choice in ("auto", None)):
        return Tooling()
    if not functions:
        raise InvalidParameterError("tools", "is empty, and tool_choice asks for a call")
    told = partial(Tooling, offered_tools(body.tools, choice), parallel=body.parallel_tool_calls)
    names = list(functions)
    if choice in ("auto", None):
        return told(None, None if parser is None else partial(PARSERS[parser], names))
    if body.form() is not None:
        raise InvalidParameterError(
            "tool_choice",
            "asks for a call, and the answer has another form already; "
            "leave out response_format and structured_outputs, or choose 'auto'",
        )
    if choice == "required":
        schema = calls_schema(list(functions.items()), body.parallel_tool_calls)
        return told(StructuredOutputs(json_schema=schema), partial(CallListReader, names))
    name = choice["function"]["name"]
    if name not in functions:
        raise InvalidParameterError("tool_choice", f"{name!r} is not among the tools")
    form = StructuredOutputs(json_schema=arguments_schema(functions[name]))
    return told(form, partial(NamedCallReader, name))
