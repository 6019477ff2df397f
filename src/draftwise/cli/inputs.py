"""Input of ``draftwise generate``: prompts and JSON schemas."""

from __future__ import annotations

import json
from pathlib import Path

from draftwise.errors import InvalidParameterError
from draftwise.prompts import load_prompts
from draftwise.structured_outputs import StructuredOutputs


def read_prompts(prompt: str | None, file: Path | None, num_prompts: int | None) -> list[str]:
    """Return the prompt of the command line, or the prompts of a file.

    Raises:
        InvalidParameterError: both or neither are given.
        PromptError: the file cannot be read.
    """
    if (prompt is None) == (file is None):
        raise InvalidParameterError("prompt", "give either a prompt or --prompts FILE")
    if file is not None:
        return load_prompts(file, num_prompts)
    return [prompt or ""]


def read_schema(file: Path | None) -> StructuredOutputs | None:
    """Read a JSON schema from a file; ``None`` without a file.

    Raises:
        InvalidParameterError: the file cannot be read or is not JSON.
    """
    if file is None:
        return None
    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidParameterError(
            "json_schema", f"cannot read {str(file)!r} as JSON: {error}"
        ) from error
    return StructuredOutputs(json_schema=schema)
