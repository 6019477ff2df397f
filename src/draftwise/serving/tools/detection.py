"""Registry of the parsers of tool calls, and detection of the parser for a chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from draftwise.serving.tools.events import ToolReader
from draftwise.serving.tools.hermes import HermesReader
from draftwise.serving.tools.llama3_json import Llama3JsonReader

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
