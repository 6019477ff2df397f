"""Tool calls of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

Small models leave out the tags of an answer that is a call.
"""

from __future__ import annotations

from draftwise.serving.tools.tagged import TaggedReader


class HermesReader(TaggedReader):
    """Parser of calls between tags, or at the beginning of the answer."""

    begin, end = "<tool_call>", "</tool_call>"
