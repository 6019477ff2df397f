"""Answers that were constrained to be calls, for models of any template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.serving.tools.events import (
    Arguments,
    Call,
    Event,
    Text,
    call_events,
    parse_json_start,
)

# Behind these keys stand values, not schemas.
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
# One way of writing JSON, so that no small model loses itself in whitespace.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the arguments of a function are; none are given for a function without parameters."""
    return {"x-guidance": _WRITING, "type": "object", **(parameters or _EMPTY)}


def calls_schema(
    functions: Sequence[tuple[str, Mapping[str, Any] | None]], parallel: bool
) -> dict[str, Any]:
    """A list of calls, at least one.

    Args:
        functions: name and parameters of each.
        parallel: whether there may be several calls.
    """
    definitions, kinds = {}, []
    for number, (name, parameters) in enumerate(functions):
        # Each schema has a place of its own, so that what it refers to within itself is found.
        place = f"function_{number}"
        definitions[place] = _moved(arguments_schema(parameters), f"#/$defs/{place}")
        properties = {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}}
        kinds.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema = {
        "x-guidance": _WRITING,
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": kinds},
        "$defs": definitions,
    }
    return schema if parallel else schema | {"maxItems": 1}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself lead to its new place."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        else:
            moved[key] = value if key in _VALUES else _moved(value, place)
    return moved


class NamedCallReader:
    """Reads an answer that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        """Begin with an empty answer to a request for this function."""
        self._name = name
        self._has_begun = False

    def read(self, text: str) -> list[Event]:
        """Take the next piece of the answer."""
        if not text:
            return []
        events: list[Event] = [] if self._has_begun else [Call(self._name)]
        self._has_begun = True
        return [*events, Arguments(text)]

    def finish(self) -> list[Event]:
        """The answer has ended."""
        return []


class CallListReader:
    """Reads an answer that is a list of calls; one that was cut off is text."""

    def __init__(self, names: Sequence[str]) -> None:
        """Begin with an empty answer.

        Args:
            names: of the functions that may be called.
        """
        self._names = names
        self._unread = ""

    def read(self, text: str) -> list[Event]:
        """Take the next piece of the answer."""
        self._unread += text
        events: list[Event] = []
        while True:
            begun = self._unread.lstrip("[, \t\r\n")
            try:
                value, end = parse_json_start(begun)
            except ValueError:
                return events  # incomplete
            call = call_events(value, self._names, "parameters")
            if call is None:
                return events
            events += call
            self._unread = begun[end:]

    def finish(self) -> list[Event]:
        """The answer has ended."""
        rest, self._unread = self._unread.strip("[, \t\r\n"), ""
        return [Text(rest)] if rest.strip("], \t\r\n") else []
