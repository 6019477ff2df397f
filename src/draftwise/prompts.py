"""Prompt files: JSON lines as the field's benchmarks ship them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftwise.errors import PromptError

# Spec-Bench and MT-Bench have `turns`, HumanEval `prompt`, GSM8K `question`, MBPP `text`.
_KEYS = ("prompt", "question", "turns", "text")


def load_prompts(path: str | Path, num_prompts: int | None = None) -> list[str]:
    """Read prompts from a file of JSON lines.

    Args:
        path: each line an object with ``prompt``, ``question``, ``turns`` (the first is taken) or
            ``text``.
        num_prompts: stop after this many; ``None`` for all.

    Raises:
        PromptError: the file cannot be read, or a line has none of the keys; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError("prompts", f"cannot read {str(path)!r}: {error}") from error
    prompts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if num_prompts is not None and len(prompts) == num_prompts:
            break
        if line.strip():
            prompts.append(_prompt(line, f"{path}:{number}"))
    if not prompts:
        raise PromptError("prompts", f"{str(path)!r} holds no prompts")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError("prompts", f"{where} is not JSON: {error}") from error
    for key in _KEYS:
        value = record.get(key) if isinstance(record, dict) else None
        if key == "turns" and isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value:
            return value
    raise PromptError("prompts", f"{where} has no text under any of {', '.join(_KEYS)}")
