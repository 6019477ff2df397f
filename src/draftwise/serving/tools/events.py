"""Events that parsers of tool calls emit, and helpers for text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


def held_back(text: str, tag: str) -> int:
    """Length of the longest suffix of a text that is a proper prefix of a tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
