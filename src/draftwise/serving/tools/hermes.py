"""Calls as Hermes and Qwen write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Collection

from draftwise.serving.tools.events import Content, Event, call_events, held_back, parse_json

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesReader:
    """Reads calls between tags; the last may lack its closing tag. Malformed ones are text."""

    def __init__(self, names: Collection[str]) -> None:
        """Begin with an empty answer.

        Args:
            names: of the functions that may be called.
        """
        self._names = names
        self._content = Content()
        self._unread = ""
        self._is_inside = self._has_called = False

    def read(self, text: str) -> list[Event]:
        """Take the next piece of the answer."""
        self._unread += text
        events: list[Event] = []
        while True:
            tag = _END if self._is_inside else _BEGIN
            before, found, after = self._unread.partition(tag)
            if not found:
                break
            self._unread = after
            events += self._call(before, _END) if self._is_inside else self._content.add(before)
            self._is_inside = not self._is_inside
        if not self._is_inside:
            end = len(self._unread) - held_back(self._unread, _BEGIN)
            events += self._content.add(self._unread[:end])
            self._unread = self._unread[end:]
        return events

    def finish(self) -> list[Event]:
        """The answer has ended."""
        unread, self._unread = self._unread, ""
        events = self._call(unread, "") if self._is_inside else self._content.add(unread)
        self._is_inside = False
        if not self._has_called:
            events += self._content.finish()
        return events

    def _call(self, between: str, end: str) -> list[Event]:
        """What stands behind an opening tag."""
        try:
            events = call_events(parse_json(between), self._names, "arguments")
        except ValueError:
            events = None
        if events is None:
            return self._content.add(_BEGIN + between + end)
        self._content.drop_space()
        self._has_called = True
        return events
