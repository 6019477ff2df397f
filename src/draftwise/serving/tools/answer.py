"""One answer, told apart into content and calls in OpenAI's form."""

from __future__ import annotations

import secrets
from typing import Any

from draftwise.serving.tools.events import Arguments, Call, Event, Text, ToolReader

Json = dict[str, Any]


class ToolAnswer:
    """An answer that may call tools.

    Attributes:
        num_calls: so far.
    """

    def __init__(self, reader: ToolReader, parallel: bool) -> None:
        """Begin with an empty answer.

        Args:
            reader: of this answer alone.
            parallel: keep all calls; otherwise only the first.
        """
        self.num_calls = 0
        self._reader, self._parallel = reader, parallel
        self._is_dropped = False

    def delta(self, text: str, is_last: bool) -> Json:
        """What a piece of the answer adds; empty if nothing is certain of it yet."""
        return self._told(self._events(text, is_last))

    def message(self, text: str) -> Json:
        """The whole answer: ``content``, and ``tool_calls`` if there are any."""
        told = self._told(self._events(text, True))
        calls = told.get("tool_calls", [])
        for call in calls:
            del call["index"]
        content = told.get("content")
        if not calls:
            return {"content": content or ""}
        return {"content": content, "tool_calls": calls}

    def _events(self, text: str, is_last: bool) -> list[Event]:
        events = self._reader.read(text)
        return [*events, *self._reader.finish()] if is_last else events

    def _told(self, events: list[Event]) -> Json:
        content = ""
        calls: list[Json] = []
        for event in events:
            match event:
                case Text(text):
                    content += text
                case Call(name):
                    self._is_dropped = not self._parallel and self.num_calls > 0
                    if not self._is_dropped:
                        calls.append(self._begun(name))
                        self.num_calls += 1
                case Arguments(text) if not self._is_dropped:
                    index = self.num_calls - 1
                    if not calls:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        told: Json = {}
        if content:
            told["content"] = content
        if calls:
            told["tool_calls"] = calls
        return told

    def _begun(self, name: str) -> Json:
        return {
            "index": self.num_calls,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
