"""Parsing and validation of the values of command-line options."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.errors import InvalidParameterError
from draftwise.speculation import SpeculationConfig
from draftwise.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from draftwise.llm import LLM


def parse_policy_options(given: Sequence[str]) -> dict[str, Any]:
    """Parse ``["threshold=0.5", …]`` to a mapping; values that are not JSON are strings.

    Raises:
        InvalidParameterError: an item is not ``KEY=VALUE``, or a key is given twice.
    """
    options: dict[str, Any] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise InvalidParameterError("policy_options", f"must be KEY=VALUE, got {each!r}")
        if key in options:
            raise InvalidParameterError("policy_options", f"{key!r} is given twice")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def parse_speculative_config(text: str | None) -> SpeculationConfig | None:
    """Parse the JSON object of ``--speculative-config``; ``None`` if it was not given.

    Raises:
        InvalidParameterError: it is no JSON object, or a key or a value is not supported.
    """
    if text is None:
        return None
    field = "speculative_config"
    values: object = None
    with suppress(ValueError, RecursionError):
        values = json.loads(text)
    if not isinstance(values, dict):
        raise InvalidParameterError(field, f"must be a JSON object, got {text!r}")
    try:
        return SpeculationConfig.from_dict(values)
    except InvalidParameterError as error:
        key = error.field.removeprefix("speculation.")
        raise InvalidParameterError(field, f"{key!r}: {error.message}") from error


def read_schema(file: Path) -> StructuredOutputs:
    """Read a JSON schema from a file.

    Raises:
        InvalidParameterError: the file cannot be read or is not a JSON schema.
    """
    try:
        schema = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidParameterError(
            "structured_outputs", f"cannot read {str(file)!r} as JSON: {error}"
        ) from error
    return StructuredOutputs(json_schema=schema)


def parse_lenience(text: str) -> float | dict[int, float]:
    """Parse a lenience such as ``"0.8"``, or a lenience by load such as ``"0:1.0,16:0.8"``.

    The keys of a lenience by load are numbers of waiting requests.

    Raises:
        InvalidParameterError: the text is neither.
    """
    try:
        if ":" not in text:
            return float(text)
        pairs = [each.split(":") for each in text.split(",")]
        by_load = {int(num_waiting): float(value) for num_waiting, value in pairs}
    except ValueError:
        raise InvalidParameterError(
            "lenience", f"must be a number, or by load such as 0:1.0,16:0.8, got {text!r}"
        ) from None
    if len(by_load) < len(pairs):
        raise InvalidParameterError(
            "lenience", f"{text!r} has two values for the same number of waiting requests"
        )
    return by_load


def parse_numbers(field: str, text: str) -> list[int]:
    """Parse integers such as ``"1,8,32"``.

    Raises:
        InvalidParameterError: a part is not an integer.
    """
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InvalidParameterError(
            field, f"must be integers separated by commas, got {text!r}"
        ) from None


def parse_temperatures(field: str, text: str) -> list[float]:
    """Parse different temperatures such as ``"0,0.8"``.

    Raises:
        InvalidParameterError: a part is not a number.
    """
    try:
        return list(dict.fromkeys(float(number) for number in text.split(",")))
    except ValueError:
        raise InvalidParameterError(
            field, f"must be numbers separated by commas, got {text!r}"
        ) from None


def set_threads(threads: int) -> None:
    """Set the number of threads that PyTorch computes with.

    Raises:
        InvalidParameterError: the number is less than 1.
    """
    if threads < 1:
        raise InvalidParameterError("threads", f"must be at least 1, got {threads}")
    import torch

    torch.set_num_threads(threads)


def make_folder(output: Path) -> None:
    """Create the output folder of a command if it does not exist.

    Raises:
        InvalidParameterError: the folder cannot be created or is not writable.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameterError("output", f"cannot create {str(output)!r}: {error}") from error
    if not os.access(output, os.W_OK):
        raise InvalidParameterError("output", f"cannot write into {str(output)!r}")


def check_max_tokens(max_tokens: int) -> int:
    """Validate the maximum number of tokens of a command that shows text.

    Raises:
        InvalidParameterError: the number is less than 1.
    """
    if max_tokens < 1:
        raise InvalidParameterError("max_tokens", f"must be at least 1, got {max_tokens}")
    return max_tokens


def read_chat_template(file: Path | None) -> str | None:
    """Read a chat template; ``None`` for the tokenizer's template.

    Raises:
        InvalidParameterError: the file cannot be read, or is not a Jinja template.
    """
    from draftwise.chat_templates import load_chat_template

    return None if file is None else load_chat_template(file)


def set_chat_template(llm: LLM, template: str | None) -> None:
    """Replace the chat template of the target's tokenizer, if a template is given."""
    if template is not None and llm.target.tokenizer is not None:
        llm.target.tokenizer.chat_template = template
