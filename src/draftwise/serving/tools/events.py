"""Events that parsers of tool calls emit, and helpers of the parsers."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol


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


class Content:
    """Text for the user. Trailing whitespace is held back, because it is dropped before a call."""

    def __init__(self) -> None:
        self._space = ""

    def add(self, text: str) -> list[Event]:
        """Append text and return the events of text that is not held back."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Text(kept)] if kept else []

    def drop_space(self) -> None:
        """Drop the whitespace that is held back, because a call follows."""
        self._space = ""

    def finish(self) -> list[Event]:
        """Return the whitespace that is held back, because no call follows."""
        space, self._space = self._space, ""
        return [Text(space)] if space else []


def call_events(value: Any, names: Collection[str], arguments_key: str) -> list[Event] | None:
    """Create the events of a call; ``None`` if the value is not a call of a known function.

    Args:
        value: parsed JSON, such as ``{"name": "add", "arguments": {"a": 1}}``.
        names: names of the functions that may be called.
        arguments_key: key of the arguments.
    """
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get(arguments_key, {})
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        return [Call(name), Arguments(_json(arguments))]
    except RecursionError:  # the nesting limit of the encoder may be lower than the decoder's
        return None


def parse_json(text: str) -> Any:
    """Parse a JSON value.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_json_start(text: str) -> tuple[Any, int]:
    """Parse the JSON value at the beginning of a text.

    Returns:
        The value, and the index of its end.

    Raises:
        ValueError: the text does not begin with a complete JSON value.
    """
    try:
        return _decoder.raw_decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def held_back(text: str, tag: str) -> int:
    """Length of the longest suffix of a text that is a proper prefix of a tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which must be escaped
        return json.dumps(value)
    return text


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_reject_constant)
