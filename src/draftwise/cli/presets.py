"""Named sets of defaults for the options of ``draftwise benchmark``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import typer

from draftwise.errors import InvalidParameterError

# Values of options by their parameter's name, as they would be typed.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Gemma 3 270M with drafts from the text itself, on whole answers that end by themselves.
        "gemma": {
            "target": "google/gemma-3-270m",
            "draft": "suffix",
            "policies": "adaptive",
            "num_speculative_tokens": "8",
            "batch_sizes": "1,8,32",
            "temperature": "0,0.8",
            "top_p": "0.95",
            "num_prompts": "32",
            "max_tokens": "128",
            "stop_at_eos": True,
            "longest_prompt": "1000",
            "max_model_len": "2048",
            "rounds": "4",
            "learning_turns": "2",
        }
    }
)


def use_preset(context: typer.Context, name: str | None) -> str | None:
    """Make the values of a preset the defaults of a command. Options that are given win.

    Must be called before the other options are parsed.

    Raises:
        InvalidParameterError: there is no such preset.
    """
    if name is None:
        return None
    if name not in PRESETS:
        raise InvalidParameterError("preset", f"must be {', '.join(PRESETS)}; got {name!r}")
    context.default_map = {**(context.default_map or {}), **PRESETS[name]}
    return name
