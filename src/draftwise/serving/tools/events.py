"""What is read from an answer: text, and calls of functions."""

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
    """A call of a function begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON object with the arguments of the call that began last."""

    text: str


Event = Text | Call | Arguments


class ToolReader(Protocol):
    """Tells text and calls apart while an answer comes.

    However the answer is cut into pieces, the same calls and the same text come out.
    """

    def read(self, text: str) -> list[Event]:
        """Take the next piece of the answer."""

    def finish(self) -> list[Event]:
        """The answer has ended; what was held back comes out."""


class Content:
    """Text for the user, whose trailing whitespace is held back: it is dropped before a call."""

    def __init__(self) -> None:
        self._space = ""

    def add(self, text: str) -> list[Event]:
        """More text."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return [Text(kept)] if kept else []

    def drop_space(self) -> None:
        """A call follows."""
        self._space = ""

    def finish(self) -> list[Event]:
        """Nothing follows, and there was no call."""
        space, self._space = self._space, ""
        return [Text(space)] if space else []


def call_events(value: Any, names: Collection[str], arguments_key: str) -> list[Event] | None:
    """The events of a call; ``None`` if the value is no call of a function that was offered.

    Args:
        value: from JSON, such as ``{"name": "add", "arguments": {"a": 1}}``.
        names: of the functions that were offered.
        arguments_key: where the arguments are.
    """
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get(arguments_key, {})
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        return [Call(name), Arguments(_json(arguments))]
    except RecursionError:  # what could just be read may be too deep to be written
        return None


def parse_json(text: str) -> Any:
    """A JSON value.

    Raises:
        ValueError: the text is not one.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_json_start(text: str) -> tuple[Any, int]:
    """The JSON value that a text begins with, and where it ends.

    Raises:
        ValueError: the text begins with none, or with an incomplete one.
    """
    try:
        return _decoder.raw_decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def held_back(text: str, tag: str) -> int:
    """Length of the longest end of a text with which a tag may begin."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(value)
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse)
