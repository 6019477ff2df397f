"""Values from users: validation, conversion to plain Python values, and lines of files."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from draftwise.errors import InvalidParameterError

# Maximum nesting of mappings and lists. Python, pickle and llguidance process nested values
# recursively, and their recursion limits are a few hundred levels.
MAX_NESTING = 100
_SHOWN_CHARACTERS = 200


def shown(value: object) -> str:
    """Format a value for an error message; safe for large, deeply nested and custom values."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, too many digits, or a failing __repr__
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or NumPy; booleans do not count as integers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain(value: object) -> object:
    """Convert NumPy numbers to Python numbers; return other values unchanged."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Validate an integer in a closed range.

    Raises:
        InvalidParameterError: the value is not an integer or is out of range.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidParameterError(name, f"must be an integer, got {shown(value)}")
    whole = int(value)
    if whole < low or (high is not None and whole > high):
        top = "" if high is None else f" and at most {high}"
        raise InvalidParameterError(name, f"must be at least {low}{top}, got {shown(whole)}")
    return whole


def number(name: str, value: object, low: float, high: float, low_open: bool = False) -> float:
    """Validate a finite number in a range, which excludes ``low`` if ``low_open``.

    Raises:
        InvalidParameterError: the value is not a finite number or is out of range.
    """
    finite = None
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            finite = float(value)
        except OverflowError:
            finite = math.inf
    if finite is None or not math.isfinite(finite):
        raise InvalidParameterError(name, f"must be a finite number, got {shown(value)}")
    if finite < low or finite > high or (low_open and finite == low):
        bracket = "(" if low_open else "["
        top = f"{high:g}]" if math.isfinite(high) else "∞)"
        raise InvalidParameterError(
            name, f"must lie in {bracket}{low:g}, {top}, got {shown(finite)}"
        )
    return finite


def boolean(name: str, value: object) -> bool:
    """Validate a boolean.

    Raises:
        InvalidParameterError: the value is not a boolean.
    """
    if not isinstance(value, bool):
        raise InvalidParameterError(name, f"must be a bool, got {shown(value)}")
    return value


def text_name(name: str, value: object, kind: str) -> str:
    """Validate a name, such as that of a model.

    Raises:
        InvalidParameterError: the value is not a string, or is empty.
    """
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(name, f"must name a {kind}, got {shown(value)}")
    return value


def path_name(name: str, value: object, kind: str) -> str:
    """Validate a name or path and convert it to a string.

    Raises:
        InvalidParameterError: the value is neither a string nor a path, or is empty.
    """
    return text_name(name, os.fspath(value) if isinstance(value, os.PathLike) else value, kind)


def path_names(name: str, value: object, kind: str) -> tuple[str, ...]:
    """Validate one name or path, or a sequence of them, and convert them to strings.

    Raises:
        InvalidParameterError: a value is neither a string nor a path, or is empty.
    """
    if isinstance(value, str | os.PathLike) or not isinstance(value, Sequence):
        value = (value,)
    return tuple(path_name(name, each, kind) for each in value)


def refuse_deep(name: str, value: object) -> None:
    """Reject values with more than :data:`MAX_NESTING` levels of mappings and lists.

    Raises:
        InvalidParameterError: the value is nested too deeply.
    """
    level: list[object] = [value]
    for _ in range(MAX_NESTING):
        parts = {id(part): part for each in level for part in _parts(each)}
        level = [part for part in parts.values() if isinstance(part, Mapping | list | tuple)]
        if not level:
            return
    raise InvalidParameterError(
        name, f"is nested deeper than {MAX_NESTING} levels of objects and lists"
    )


def mapping(name: str, value: object) -> None:
    """Check that a value is a mapping.

    Raises:
        InvalidParameterError: it is not.
    """
    if not isinstance(value, Mapping):
        raise InvalidParameterError(name, f"must be a mapping, got {shown(value)}")


def set_fields(params: object, **values: object) -> None:
    """Set fields of a frozen dataclass to their validated values."""
    for name, value in values.items():
        object.__setattr__(params, name, value)


def decimal(key: object) -> object:
    """Convert a string of up to nine decimal digits to an integer; return other values as is."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10:
        return int(key)
    return key


def reduced(params: Any) -> tuple[Any, ...]:
    """What ``__reduce__`` of a frozen dataclass with read-only mappings returns."""
    values = {item.name: getattr(params, item.name) for item in fields(params)}
    copied = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return _rebuild, (type(params), copied)


def refuse_unknown_keys(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Reject unknown keys.

    Raises:
        InvalidParameterError: a key is unknown; suggests the closest known key.
    """
    known = sorted(known)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise InvalidParameterError(f"{where}.{key}", f"unknown key; {hint}")


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()


def _rebuild(cls: type[Any], values: dict[str, Any]) -> Any:
    """Construct parameters for pickle and copy, which cannot handle a mapping proxy."""
    return cls(**values)


def numbered_lines(content: str) -> Iterator[tuple[int, str]]:
    """The lines of a file of JSON lines that are not blank, with their numbers.

    Unlike ``str.splitlines``, this keeps separators that JSON allows within strings, such as
    U+2028.
    """
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield number, line
