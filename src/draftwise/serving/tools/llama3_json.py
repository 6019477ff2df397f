"""Tool calls of Llama 3: ``{"name": …, "parameters": {…}}`` instead of text.

Several calls are separated by semicolons. ``<|python_tag|>`` may precede calls, and then text may
precede the tag.
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
# Prefixes of calls. Other JSON is text and is not held back.
_CALL_PREFIXES = ('{"name"', '{"type"', '{"parameters"', '{"function"')


class _State(Enum):
    START = auto()  # only whitespace so far
    TEXT = auto()  # calls may only follow the tag
    CALLS = auto()
    REST = auto()  # no more calls; the rest is text


class Llama3JsonReader:
    """Parser of calls in JSON. A malformed call and everything after it become text."""

    def __init__(self, names: Collection[str]) -> None:
        """Create the parser of one answer.

        Args:
            names: names of the functions that may be called.
        """
        self._names = names
        self._content = Content()
        self._unread = ""
        self._state = _State.START
        self._has_called = False

    def read(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""
        self._unread += text
        events: list[Event] = []
        if self._state is _State.START:
            rest = self._unread.lstrip()
            if rest.startswith("{"):
                self._state = _State.CALLS
            elif rest and not _TAG.startswith(rest):
                self._state = _State.TEXT
        if self._state is _State.TEXT:
            start = self._unread.find(_TAG)
            end = len(self._unread) - held_back(self._unread, _TAG) if start < 0 else start
            events += self._content.add(self._unread[:end])
            self._unread = self._unread[end:]
            if start >= 0:
                self._state = _State.CALLS
        if self._state is _State.CALLS:
            events += self._calls()
        if self._state is _State.REST:
            events += self._content.add(self._unread)
            self._unread = ""
        return events

    def finish(self) -> list[Event]:
        """End the answer and return the events of text that was held back."""
        events: list[Event] = []
        if not (self._has_called and not self._unread.strip(_SEPARATORS)):
            events += self._content.add(self._unread)
        self._unread = ""
        if not self._has_called:
            events += self._content.finish()
        return events

    def _calls(self) -> list[Event]:
        """The events of complete calls."""
        events: list[Event] = []
        while True:
            rest = self._unread.lstrip(_SEPARATORS if self._has_called else None)
            rest = rest.removeprefix(_TAG).lstrip() if not self._has_called else rest
            prefix = "".join(rest[:200].split())
            if not any(
                each.startswith(prefix) or prefix.startswith(each) for each in _CALL_PREFIXES
            ):
                self._state = _State.REST
                return events
            try:
                value, end = parse_json_start(rest)
            except ValueError:
                return events  # the call may be incomplete
            # Some models write "arguments" instead of "parameters".
            key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
            call = call_events(value, self._names, key)
            if call is None:
                self._state = _State.REST
                return events
            self._content.drop_space()
            self._has_called = True
            self._unread = rest[end:]
            events += call
