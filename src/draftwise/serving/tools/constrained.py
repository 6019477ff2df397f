"""Required tool calls, generated with a grammar and independent of the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.serving.tools.calls import Arguments, Call, CallScanner, Event, Text

# The values of these keys are not schemas.
_VALUE_KEYS = frozenset({"const", "default", "enum", "example", "examples"})
# Fixed whitespace, as small models could otherwise generate whitespace without end.
_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BEFORE_CALLS, _AFTER_CALLS = "[, \t\r\n", "], \t\r\n"
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """JSON schema of the arguments of a function; empty for a function without parameters."""
    return {"x-guidance": _WHITESPACE, "type": "object", **(parameters or _EMPTY)}


def calls_schema(
    functions: Sequence[tuple[str, Mapping[str, Any] | None]], parallel: bool
) -> dict[str, Any]:
    """JSON schema of a list of at least one call.

    Args:
        functions: name and parameters of each function.
        parallel: whether the list may contain several calls.
    """
    definitions, calls = {}, []
    for number, (name, parameters) in enumerate(functions):
        # Each schema becomes a definition, to which its internal references are adapted.
        key = f"function_{number}"
        definitions[key] = _relocate(arguments_schema(parameters), f"#/$defs/{key}")
        properties = {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema = {
        "x-guidance": _WHITESPACE,
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }
    return schema if parallel else schema | {"maxItems": 1}


def _relocate(schema: Any, path: str) -> Any:
    """Copy a schema with its internal references prefixed by a path."""
    if isinstance(schema, list):
        return [_relocate(each, path) for each in schema]
    if not isinstance(schema, dict):
        return schema
    relocated = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            relocated[key] = path + value[1:]
        else:
            relocated[key] = value if key in _VALUE_KEYS else _relocate(value, path)
    return relocated


class NamedCallReader:
    """Parser of an answer that consists of the arguments of one function."""

    def __init__(self, name: str) -> None:
        """Create the parser of a call of this function."""
        self._name = name
        self._has_begun = False

    def read(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""
        if not text:
            return []
        events: list[Event] = [] if self._has_begun else [Call(self._name)]
        self._has_begun = True
        return [*events, Arguments(text)]

    def finish(self) -> list[Event]:
        """End the answer."""
        return []


class CallListReader:
    """Parser of an answer that is a list of calls; an incomplete call becomes text."""

    def __init__(self, names: Sequence[str]) -> None:
        """Create the parser of one answer.

        Args:
            names: names of the functions that may be called.
        """
        self._scanner: CallScanner | None = CallScanner(names)
        self._unread = ""

    def read(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""
        self._unread += text
        events: list[Event] = []
        while self._scanner is not None:
            self._unread = self._unread.lstrip(_BEFORE_CALLS)
            try:
                found = self._scanner.scan(self._unread)
            except ValueError:
                self._scanner = None
                break
            if found is None:
                break
            call, end = found
            events += call
            self._unread = self._unread[end:]
        return events

    def finish(self) -> list[Event]:
        """End the answer and return the remaining text."""
        rest, self._unread = self._unread.strip(_BEFORE_CALLS), ""
        return [Text(rest)] if rest.strip(_AFTER_CALLS) else []
