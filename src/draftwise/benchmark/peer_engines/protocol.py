"""Types of the requests to a worker process, and of its answers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# The first request has the models, the limits and the settings of the mode. Further requests have
# `prompts`, `max_tokens`, `temperature`, `top_p`, `top_k` (0 without a limit), `seeds` (one per
# prompt, or ``None``) and `stop_token_ids` (empty if every answer has `max_tokens` tokens).
Settings = dict[str, Any]
# Returns the answers to a batch, in order, and the speculation counters of the engine, if any. An
# answer includes the stop token that ended it.
Generate = Callable[[list[list[int]], Settings], tuple[list[list[int]], Settings]]


def first_version(*names: str) -> str:
    """Version of the first of some packages that is installed; empty if none is."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
