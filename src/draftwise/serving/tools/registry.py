"""The forms of calls that can be read, and which of them a chat template asks for."""

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


def recognise(template: Any) -> str | None:
    """The parser for what a chat template tells the model to write; ``None`` if none is known.

    Args:
        template: Jinja text, several by name, or ``None``, as tokenizers have it.
    """
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not isinstance(template, str):
        return None
    # Qwen3-Coder puts XML between the same tags.
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3_json"
    return None
