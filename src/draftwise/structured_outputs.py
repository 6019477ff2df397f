"""What form a generated text must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.values import boolean, refuse_deep, shown

_FIELD = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputs:
    """The form that a request's text must have, given in exactly one way.

    At every place only tokens may come that leave the text completable, and the end of the text
    only where it is complete. A text that ``max_tokens`` ends, or a stop string, is the beginning
    of a complete one.

    Attributes:
        json_schema: JSON that this schema describes, as a mapping of at most 100 levels.
        json_object: True for any JSON object.
        regex: a regular expression that matches the whole text, in the syntax of Rust's ``regex``
            without look-around.
        choice: one of these strings.
        grammar: a context-free grammar in llguidance's variant of Lark; its start is ``start``.

    Raises:
        InvalidParameterError: none or several are given, or one is not what it should be.
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
        if self.choice is not None:
            if not isinstance(self.choice, list | tuple) or not self.choice:
                raise InvalidParameterError(
                    f"{_FIELD}.choice", f"must be a list of strings, got {shown(self.choice)}"
                )
            for text in self.choice:
                _text(f"{_FIELD}.choice", text)
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def kind(self) -> str:
        """Name of the one field that is given."""
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
    """A copy of the caller's own, which may change."""
    name = f"{_FIELD}.json_schema"
    if not isinstance(value, Mapping):
        raise InvalidParameterError(name, f"must be a mapping, got {shown(value)}")
    refuse_deep(name, value)
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameterError(name, f"is not JSON: {error}") from error
    return copied
