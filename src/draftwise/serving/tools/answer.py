"""Separation of an answer into content and tool calls in OpenAI's format."""

from __future__ import annotations

import secrets
from typing import Any

from draftwise.serving.tools.events import Arguments, Call, Event, Text, ToolReader

Json = dict[str, Any]


class ToolAnswer:
    """An answer that may contain tool calls.

    Attributes:
        num_calls: number of tool calls so far.
    """

    def __init__(self, reader: ToolReader, parallel: bool) -> None:
        """Create an empty answer.

        Args:
            reader: parser of this answer.
            parallel: keep all calls; otherwise only the first.
        """
        self.num_calls = 0
        self._reader, self._parallel = reader, parallel
        self._is_dropped = False

    def delta(self, text: str, is_last: bool) -> Json:
        """The delta of a piece of the answer; empty if it cannot be classified yet."""
        return self._to_delta(self._events(text, is_last))

    def message(self, text: str) -> Json:
        """The complete message: ``content``, and ``tool_calls`` if there are any."""
        delta = self._to_delta(self._events(text, True))
        calls = delta.get("tool_calls", [])
        for call in calls:
            del call["index"]
        content = delta.get("content")
        if not calls:
            return {"content": content or ""}
        return {"content": content, "tool_calls": calls}

    def _events(self, text: str, is_last: bool) -> list[Event]:
        events = self._reader.read(text)
        return [*events, *self._reader.finish()] if is_last else events

    def _to_delta(self, events: list[Event]) -> Json:
        content = ""
        calls: list[Json] = []
        for event in events:
            match event:
                case Text(text):
                    content += text
                case Call(name):
                    self._is_dropped = not self._parallel and self.num_calls > 0
                    if not self._is_dropped:
                        calls.append(self._new_call(name))
                        self.num_calls += 1
                case Arguments(text) if not self._is_dropped:
                    index = self.num_calls - 1
                    if not calls:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        delta: Json = {}
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _new_call(self, name: str) -> Json:
        return {
            "index": self.num_calls,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
