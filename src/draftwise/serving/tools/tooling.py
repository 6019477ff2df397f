"""Tools of a chat request: their presentation in the prompt, and the calls in the answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.serving.schemas.chat import ChatBody, offered_tools
from draftwise.serving.tools.calls import Arguments, Call, Event, Text, ToolReader
from draftwise.serving.tools.constrained import (
    CallListReader,
    NamedCallReader,
    arguments_schema,
    calls_schema,
)
from draftwise.serving.tools.tagged import PARSERS
from draftwise.structured_outputs import StructuredOutputs

Json = dict[str, Any]


class ToolAnswer:
    """An answer that may contain tool calls.

    Attributes:
        num_calls: number of tool calls so far.
    """

    def __init__(self, reader: ToolReader, parallel: bool) -> None:
        """Create an empty answer.

        Args:
            reader: parser of this answer.
            parallel: keep all calls; otherwise only the first.
        """
        self.num_calls = 0
        self._reader, self._parallel = reader, parallel
        self._is_dropped = False

    def delta(self, text: str, is_last: bool) -> Json:
        """The delta of a piece of the answer; empty if it cannot be classified yet."""
        return self._to_delta(self._events(text, is_last))

    def message(self, text: str) -> Json:
        """The complete message: ``content``, and ``tool_calls`` if there are any."""
        delta = self._to_delta(self._events(text, True))
        calls = delta.get("tool_calls", [])
        for call in calls:
            del call["index"]
        content = delta.get("content")
        if not calls:
            return {"content": content or ""}
        return {"content": content, "tool_calls": calls}

    def _events(self, text: str, is_last: bool) -> list[Event]:
        events = self._reader.read(text)
        return [*events, *self._reader.finish()] if is_last else events

    def _to_delta(self, events: list[Event]) -> Json:
        content = ""
        calls: list[Json] = []
        for event in events:
            match event:
                case Text(text):
                    content += text
                case Call(name):
                    self._is_dropped = not self._parallel and self.num_calls > 0
                    if not self._is_dropped:
                        calls.append(self._new_call(name))
                        self.num_calls += 1
                case Arguments(text) if not self._is_dropped:
                    index = self.num_calls - 1
                    if not calls:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        delta: Json = {}
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _new_call(self, name: str) -> Json:
        return {
            "index": self.num_calls,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }


@dataclass(frozen=True)
class Tooling:
    """How the tools of a chat request are presented, required and parsed.

    Attributes:
        tools: tools for the chat template; ``None`` for none.
        grammar: grammar of the answer if it must be a call; ``None`` otherwise.
        new_reader: creates the parser of one answer; ``None`` if the answer is only text.
        parallel: whether an answer may have several calls.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    grammar: StructuredOutputs | None = None
    new_reader: Callable[[], ToolReader] | None = None
    parallel: bool = True

    def new_answer(self) -> ToolAnswer | None:
        """Create the object that separates one answer; ``None`` if the answer is only text."""
        return None if self.new_reader is None else ToolAnswer(self.new_reader(), self.parallel)


def prepare_tools(body: ChatBody, parser: str | None) -> Tooling:
    """Determine how the tools of a chat request are presented, required and parsed.

    Args:
        body: body of the request.
        parser: name of the parser of tool calls with ``tool_choice: auto``; ``None`` if the format
            of the model is unknown.

    Raises:
        InvalidParameterError: a tool is defined twice, the tool choice names an unknown tool, or
            the answer would need two grammars.
    """
    functions = {}
    for number, tool in enumerate(body.tools):
        if tool.function.name in functions:
            raise InvalidParameterError(
                f"tools[{number}].function.name", f"{tool.function.name!r} is defined twice"
            )
        functions[tool.function.name] = tool.function.parameters
    choice = body.tool_choice
    if choice == "none" or (not functions and choice in ("auto", None)):
        return Tooling()
    if not functions:
        raise InvalidParameterError("tools", "is empty, but tool_choice requires a call")
    tooling = partial(Tooling, offered_tools(body.tools, choice), parallel=body.parallel_tool_calls)
    names = list(functions)
    if choice in ("auto", None):
        return tooling(None, None if parser is None else partial(PARSERS[parser], names))
    if body.grammar() is not None:
        raise InvalidParameterError(
            "tool_choice",
            "requires a call and cannot be combined with response_format or structured_outputs; "
            "leave them out, or use 'auto'",
        )
    if choice == "required":
        schema = calls_schema(list(functions.items()), body.parallel_tool_calls)
        return tooling(StructuredOutputs(json_schema=schema), partial(CallListReader, names))
    name = choice["function"]["name"]
    if name not in functions:
        raise InvalidParameterError("tool_choice", f"{name!r} is not among the tools")
    grammar = StructuredOutputs(json_schema=arguments_schema(functions[name]))
    return tooling(grammar, partial(NamedCallReader, name))
