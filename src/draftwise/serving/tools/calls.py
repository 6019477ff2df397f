"""Calls in a text, which are JSON objects with the name of a function, and their events."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

_CLOSING = {"{": "}", "[": "]"}
# Everything but quotes and brackets that JSON allows outside of strings.
_BETWEEN = re.compile(r"[ \t\r\n:,0-9+\-.eEtrufalsn]*")
_IN_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Start of a function call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON object with the arguments of the current call."""

    text: str


Event = Text | Call | Arguments


class ToolReader(Protocol):
    """Incremental parser that separates an answer into text and calls.

    The result does not depend on how the answer is split into pieces.
    """

    def read(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""

    def finish(self) -> list[Event]:
        """End the answer and return the events of text that was held back."""


class CallScanner:
    """Recognises a call in a text that grows.

    The end of a call is found by following strings and brackets, so each character is read once.
    Text that is not JSON is mostly recognised before it is complete.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Create a scanner.

        Args:
            names: names of the functions that may be called.
        """
        self._names = names
        self._restart()

    def scan(self, text: str, start: int = 0) -> tuple[list[Event], int] | None:
        """Look for a call at the beginning of a text.

        Args:
            text: text that may begin with a call. Until the call is complete, the text of each
                scan begins with the text of the previous scan.
            start: index where the text begins.

        Returns:
            The events of the call and the index of its end; ``None`` if the call is incomplete.

        Raises:
            ValueError: the text does not begin with a call.
        """
        if not self._has_ended(text, start):
            return None
        end = start + self._length
        events = _parse_call(text[start:end], self._names)
        self._restart()
        return events, end

    def _restart(self) -> None:
        self._length = 0  # length of the text that has been read
        self._brackets: list[str] = []  # closing brackets that are still to come
        self._is_in_string = False

    def _has_ended(self, text: str, start: int) -> bool:
        """Read on, and return whether the object is complete."""
        while True:
            if self._brackets:
                part = _IN_STRING if self._is_in_string else _BETWEEN
                match = part.match(text, start + self._length)
                assert match is not None  # both parts may be empty
                self._length = match.end() - start
            character = text[start + self._length : start + self._length + 1]
            if not character or (self._is_in_string and character == "\\"):
                return False
            if character == '"' and self._brackets:
                self._is_in_string = not self._is_in_string
            elif character == "{" or (character == "[" and self._brackets):
                self._brackets.append(_CLOSING[character])
            elif self._brackets and character == self._brackets[-1]:
                self._brackets.pop()
            else:
                raise ValueError(f"{character!r} is not expected here")
            self._length += 1
            if not self._brackets:
                return True


def _parse_call(text: str, names: Collection[str]) -> list[Event]:
    """The events of a call such as ``{"name": "add", "arguments": {"a": 1}}``.

    Raises:
        ValueError: it is not a call of one of these functions.
    """
    try:
        call = _parse_json(text)
        name, arguments = call.get("name"), _arguments(call)
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            raise ValueError("is not a call of a known function")
        return [Call(name), Arguments(_to_json(arguments))]
    except RecursionError as error:  # the limits of decoder and encoder differ
        raise ValueError("is nested too deeply") from error


def _arguments(call: dict[str, Any]) -> Any:
    """The arguments of a call. Models also write them as a string, or leave them out."""
    # Llama writes "parameters", and sometimes "arguments".
    keys = call.keys() & {"arguments", "parameters"}
    given = [call[key] for key in keys if call[key] is not None]
    if len(given) > 1 or (not keys and call.keys() - {"name", "type", "id"}):
        raise ValueError("has no arguments, or has them in two places")
    value = given[0] if given else {}
    if isinstance(value, str):
        value = _parse_json(value) if value.strip() else {}
    return {} if value is None else value


def _parse_json(text: str) -> Any:
    # Not strict: models write line breaks in strings as they are.
    return json.loads(text, strict=False, parse_constant=_reject_constant)


def _to_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which must be escaped
        return json.dumps(value)
    return text


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
