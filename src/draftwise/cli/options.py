"""What options of a command line say: several values in one, or where to write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.llm import LLM


def parse_policy_options(given: Sequence[str]) -> dict[str, Any]:
    """``["threshold=0.5", …]`` as a mapping; values are JSON where that is possible, else text.

    Raises:
        InvalidParameterError: one is not ``KEY=VALUE``, or is given twice.
    """
    options: dict[str, Any] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise InvalidParameterError("policy_option", f"must be KEY=VALUE, got {each!r}")
        if key in options:
            raise InvalidParameterError("policy_option", f"{key!r} is given twice")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def parse_lenience(text: str) -> float | dict[int, float]:
    """``"0.8"``, or a rule by the number of waiting requests: ``"0:1.0,16:0.8"``.

    Raises:
        InvalidParameterError: it is neither.
    """
    try:
        if ":" not in text:
            return float(text)
        pairs = [each.split(":") for each in text.split(",")]
        rule = {int(start): float(value) for start, value in pairs}
    except ValueError:
        raise InvalidParameterError(
            "lenience", f"must be a number or a rule such as 0:1.0,16:0.8, got {text!r}"
        ) from None
    if len(rule) < len(pairs):
        raise InvalidParameterError("lenience", f"{text!r} says twice what holds from one number")
    return rule


def parse_numbers(field: str, text: str) -> list[int]:
    """``"1,8,32"`` as numbers.

    Raises:
        InvalidParameterError: they are not whole numbers.
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InvalidParameterError(
            field, f"must be whole numbers separated by commas, got {text!r}"
        ) from None


def set_threads(threads: int) -> None:
    """Compute with so many threads.

    Raises:
        InvalidParameterError: there would be none.
    """
    if threads < 1:
        raise InvalidParameterError("threads", f"must be at least 1, got {threads}")
    import torch

    torch.set_num_threads(threads)


def make_folder(output: Path) -> None:
    """Make the folder that a command writes into, if there is none.

    Raises:
        InvalidParameterError: it cannot be made or written into.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameterError("output", f"cannot make {str(output)!r}: {error}") from error
    if not os.access(output, os.W_OK):
        raise InvalidParameterError("output", f"cannot write into {str(output)!r}")


def check_max_tokens(max_tokens: int) -> int:
    """The number itself; a command that shows text generates at least one token of it.

    Raises:
        InvalidParameterError: it is less than 1.
    """
    if max_tokens < 1:
        raise InvalidParameterError("max_tokens", f"must be at least 1, got {max_tokens}")
    return max_tokens


def read_chat_template(file: Path | None) -> str | None:
    """The text of a chat template; ``None`` for the tokenizer's own.

    Raises:
        InvalidParameterError: it cannot be read, or is no Jinja template.
    """
    from draftwise.prompts import load_chat_template

    return None if file is None else load_chat_template(file)


def set_chat_template(llm: LLM, template: str | None) -> None:
    """Let a model's chats be written by another template than its tokenizer's own."""
    if template is not None and llm.target.tokenizer is not None:
        llm.target.tokenizer.chat_template = template
