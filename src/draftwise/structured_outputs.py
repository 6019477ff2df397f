"""Grammars for structured outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.values import boolean, refuse_deep, shown

_FIELD = "structured_outputs"
# Larger grammars take long to compile, and to copy to the engine.
_MOST_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class StructuredOutputs:
    """Grammar that the text of a request must match. Exactly one field must be set.

    At each position only tokens are allowed after which the text can still be completed, and the
    text may end only where it is complete. A text that is ended by ``max_tokens`` or a stop string
    is a prefix of a matching text.

    Attributes:
        json_schema: JSON schema as a mapping with at most 100 levels; the text is JSON that
            matches it.
        json_object: True for an arbitrary JSON object.
        regex: regular expression that matches the whole text, in the syntax of Rust's ``regex``
            without look-around.
        choice: strings of which the text is one.
        grammar: context-free grammar in llguidance's variant of Lark, with the start rule
            ``start``.

    Raises:
        InvalidParameterError: no field or several fields are set, or a value is invalid or has more
            than 262,144 characters.
    """

    json_schema: Mapping[str, Any] | None = field(default=None, hash=False)
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        boolean(f"{_FIELD}.json_object", self.json_object)
        given = [item.name for item in fields(self) if _is_given(getattr(self, item.name))]
        if len(given) != 1:
            names = ", ".join(item.name for item in fields(self))
            raise InvalidParameterError(
                _FIELD, f"must have exactly one of {names}; got {', '.join(given) or 'none'}"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema(self.json_schema))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _text(f"{_FIELD}.{name}", getattr(self, name))
                _check_size(f"{_FIELD}.{name}", len(getattr(self, name)))
        if self.choice is not None:
            if not isinstance(self.choice, list | tuple) or not self.choice:
                raise InvalidParameterError(
                    f"{_FIELD}.choice", f"must be a list of strings, got {shown(self.choice)}"
                )
            for text in self.choice:
                _text(f"{_FIELD}.choice", text)
            _check_size(f"{_FIELD}.choice", sum(map(len, self.choice)))
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(item.name for item in fields(self) if _is_given(getattr(self, item.name)))


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(name, f"must be a non-empty string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(name, f"cannot be written in UTF-8: {error}") from error


def _schema(value: object) -> dict[str, Any]:
    """Copy a JSON schema, as the caller may modify the original."""
    name = f"{_FIELD}.json_schema"
    if not isinstance(value, Mapping):
        raise InvalidParameterError(name, f"must be a mapping, got {shown(value)}")
    refuse_deep(name, value)
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(name, f"is not JSON: {error}") from error
    _check_size(name, len(text))
    copied: dict[str, Any] = json.loads(text)
    return copied


def _check_size(name: str, size: int) -> None:
    if size > _MOST_CHARACTERS:
        raise InvalidParameterError(
            name, f"has {size} characters; the maximum is {_MOST_CHARACTERS}"
        )
