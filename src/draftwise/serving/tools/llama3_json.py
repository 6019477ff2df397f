"""Calls as Llama 3 writes them: ``{"name": …, "parameters": {…}}`` in place of a text.

Several are separated by semicolons. They may stand behind ``<|python_tag|>``, and then behind
text, too.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from draftwise.serving.tools.events import (
    Content,
    Event,
    call_events,
    held_back,
    parse_json_start,
)

_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;"
# With one of these a call begins; other JSON is an answer, and is not held back.
_BEGINNINGS = ('{"name"', '{"type"', '{"parameters"', '{"function"')


class _Where(Enum):
    START = auto()  # nothing but whitespace has come
    TEXT = auto()  # calls only come behind the tag
    CALLS = auto()
    REST = auto()  # no call comes any more


class Llama3JsonReader:
    """Reads calls in JSON. Malformed ones, and all that follows them, are text."""

    def __init__(self, names: Collection[str]) -> None:
        """Begin with an empty answer.

        Args:
            names: of the functions that may be called.
        """
        self._names = names
        self._content = Content()
        self._unread = ""
        self._where = _Where.START
        self._has_called = False

    def read(self, text: str) -> list[Event]:
        """Take the next piece of the answer."""
        self._unread += text
        events: list[Event] = []
        if self._where is _Where.START:
            begun = self._unread.lstrip()
            if begun.startswith("{"):
                self._where = _Where.CALLS
            elif begun and not _TAG.startswith(begun):
                self._where = _Where.TEXT
        if self._where is _Where.TEXT:
            start = self._unread.find(_TAG)
            end = len(self._unread) - held_back(self._unread, _TAG) if start < 0 else start
            events += self._content.add(self._unread[:end])
            self._unread = self._unread[end:]
            if start >= 0:
                self._where = _Where.CALLS
        if self._where is _Where.CALLS:
            events += self._calls()
        if self._where is _Where.REST:
            events += self._content.add(self._unread)
            self._unread = ""
        return events

    def finish(self) -> list[Event]:
        """The answer has ended."""
        events: list[Event] = []
        if not (self._has_called and not self._unread.strip(_SEPARATORS)):
            events += self._content.add(self._unread)
        self._unread = ""
        if not self._has_called:
            events += self._content.finish()
        return events

    def _calls(self) -> list[Event]:
        """The calls that are complete."""
        events: list[Event] = []
        while True:
            begun = self._unread.lstrip(_SEPARATORS if self._has_called else None)
            begun = begun.removeprefix(_TAG).lstrip() if not self._has_called else begun
            beginning = "".join(begun[:200].split())
            if not any(
                each.startswith(beginning) or beginning.startswith(each) for each in _BEGINNINGS
            ):
                self._where = _Where.REST
                return events
            try:
                value, end = parse_json_start(begun)
            except ValueError:
                return events  # it may be incomplete
            # Some write "arguments", as they have seen it elsewhere.
            key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
            call = call_events(value, self._names, key)
            if call is None:
                self._where = _Where.REST
                return events
            self._content.drop_space()
            self._has_called = True
            self._unread = begun[end:]
            events += call
