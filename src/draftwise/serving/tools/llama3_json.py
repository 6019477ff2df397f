"""Tool calls of Llama 3: ``{"name": …, "parameters": {…}}`` instead of text.

Several calls are separated by semicolons. ``<|python_tag|>`` may precede calls, and then text may
precede the tag.
"""

from __future__ import annotations

import re

from draftwise.serving.tools.tagged import TaggedReader


class Llama3JsonReader(TaggedReader):
    """Parser of calls that are the whole answer or follow a tag."""

    begin = "<|python_tag|>"
    separators = re.compile(r"[\s;,]*")
