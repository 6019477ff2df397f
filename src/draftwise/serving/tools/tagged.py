"""Parsers of the tool calls that models write as their chat templates ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from draftwise.serving.tools.calls import CallScanner, Event, Text, ToolReader

_SPACE = re.compile(r"\s*")
# Beginnings of calls without a tag. Other JSON is text and is not held back.
_CALL_PREFIXES = ('{"name"', '{"type"', '{"parameters"', '{"arguments"')


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


class TaggedReader:
    """Parser of calls that begin the answer or follow a tag.

    Everything else is text, also a tag without a call.

    Attributes:
        begin: tag before calls.
        end: tag after calls, which may be missing; empty if there is none.
        separators: pattern of the text between the calls after one tag.
    """

    begin: ClassVar[str]
    end: ClassVar[str] = ""
    separators: ClassVar[re.Pattern[str]] = _SPACE

    def __init__(self, names: Collection[str]) -> None:
        """Create the parser of one answer.

        Args:
            names: names of the functions that may be called.
        """
        self._names = names
        self._content = Content()
        self._unread, self._start = "", 0  # the unread text begins at this index
        self._has_called = False
        # Scanner of the next call; None within text.
        self._scanner: CallScanner | None = CallScanner(names)
        self._tag = ""  # becomes text if no call follows
        self._follows_call = False

    def read(self, text: str) -> list[Event]:
        """Parse the next piece of the answer."""
        self._unread, self._start = self._unread[self._start :] + text, 0
        return self._advance(is_last=False)

    def finish(self) -> list[Event]:
        """End the answer and return the events of text that was held back."""
        events = self._advance(is_last=True)
        if not self._has_called:
            events += self._content.finish()
        return events

    def _advance(self, is_last: bool) -> list[Event]:
        """The events of text that no later text can change."""
        events: list[Event] = []
        while True:
            new = self._text(is_last) if self._scanner is None else self._call(is_last)
            if new is None:
                return events
            events += new

    def _text(self, is_last: bool) -> list[Event] | None:
        """The events up to the next tag; ``None`` if nothing is left but the start of a tag."""
        start, end = self._start, self._unread.find(self.begin, self._start)
        if end >= 0:
            self._start = end + len(self.begin)
            self._scanner = CallScanner(self._names)
            self._tag, self._follows_call = self.begin, False
        else:
            end = len(self._unread) - (0 if is_last else held_back(self._unread, self.begin))
            if end <= start:
                return None
            self._start = end
        return self._content.add(self._unread[start:end])

    def _call(self, is_last: bool) -> list[Event] | None:
        """The events of the next call, or of the tag without one; ``None`` if incomplete."""
        space = (self.separators if self._follows_call else _SPACE).match(self._unread, self._start)
        assert space is not None  # both may be empty
        start = space.end()
        if self._follows_call:
            if self.end and self._unread.startswith(self.end, start):
                return self._end_calls(start + len(self.end))
            if self._unread.startswith(self.begin, start):
                return self._end_calls(start)
            rest = self._unread[start : start + max(len(self.begin), len(self.end))]
            if is_last and self.end.startswith(rest):  # separators, or an incomplete tag
                return self._end_calls(len(self._unread))
            if not is_last and (self.end.startswith(rest) or self.begin.startswith(rest)):
                return None
        try:
            found = self._scan(start)
            if found is None and not is_last:
                return None
        except ValueError:
            found = None
        if found is None:
            self._scanner = None
            return self._content.add(self._tag)
        events, self._start = found
        self._content.drop_space()
        self._tag, self._follows_call, self._has_called = "", True, True
        return events

    def _end_calls(self, end: int) -> list[Event]:
        """Continue with text from an index on."""
        self._scanner, self._start = None, end
        return []

    def _scan(self, start: int) -> tuple[list[Event], int] | None:
        """Look for a call, as :meth:`CallScanner.scan`."""
        assert self._scanner is not None
        if not self._tag and not self._follows_call:
            text = "".join(self._unread[start : start + 200].split())
            if not any(text.startswith(each) or each.startswith(text) for each in _CALL_PREFIXES):
                raise ValueError("is other JSON")
        return self._scanner.scan(self._unread, start)


class HermesReader(TaggedReader):
    """Parser of the calls of Hermes and Qwen, between tags or at the beginning of the answer.

    A call is ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``. Small models leave out the
    tags of an answer that is a call.
    """

    begin, end = "<tool_call>", "</tool_call>"


class Llama3JsonReader(TaggedReader):
    """Parser of the calls of Llama 3, which are the whole answer or follow a tag.

    A call is ``{"name": …, "parameters": {…}}`` instead of text. Several calls are separated by
    semicolons. ``<|python_tag|>`` may precede calls, and then text may precede the tag.
    """

    begin = "<|python_tag|>"
    separators = re.compile(r"[\s;,]*")


PARSERS: Mapping[str, Callable[[Collection[str]], ToolReader]] = {
    "hermes": HermesReader,
    "llama3_json": Llama3JsonReader,
}


def detect_parser(template: Any) -> str | None:
    """Detect the parser for the calls that a chat template prescribes; ``None`` if unknown.

    Args:
        template: attribute ``chat_template`` of a tokenizer: Jinja source, a mapping from names to
            sources, or ``None``.
    """
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not isinstance(template, str):
        return None
    # Qwen3-Coder uses XML between the same tags.
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3_json"
    return None
