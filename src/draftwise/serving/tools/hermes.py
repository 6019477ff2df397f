"""Tool calls of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from draftwise.serving.tools.tagged import TaggedReader


class HermesReader(TaggedReader):
    """Parser of calls between tags."""

    begin, end = "<tool_call>", "</tool_call>"
