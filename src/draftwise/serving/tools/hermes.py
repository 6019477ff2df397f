"""Tool calls of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Collection

from draftwise.serving.tools.events import Content, Event, call_events, held_back, parse_json

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesReader:
    """Parser of calls between tags. Malformed calls become text.

    The closing tag of the last call is optional.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Create the parser of one answer.

        Args:
            names: names of the functions that may be called.
        """
        self._names = names
        self._content = Content()
        self._unread = ""
        self._is_inside = self._has_called = False

    def read(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""
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
        """End the answer and return the events of text that was held back."""
        unread, self._unread = self._unread, ""
        events = self._call(unread, "") if self._is_inside else self._content.add(unread)
        self._is_inside = False
        if not self._has_called:
            events += self._content.finish()
        return events

    def _call(self, between: str, end: str) -> list[Event]:
        """The events of the text after an opening tag."""
        try:
            events = call_events(parse_json(between), self._names, "arguments")
        except ValueError:
            events = None
        if events is None:
            return self._content.add(_BEGIN + between + end)
        self._content.drop_space()
        self._has_called = True
        return events
