"""Checks of single values that users give; what passes becomes a plain Python value."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from draftwise.errors import InvalidParameterError

# Levels of mappings and lists in a value of any form. Python, pickle and llguidance follow nesting
# by recursion, which ends at some hundred levels.
MAX_NESTING = 100
_SHOWN_CHARACTERS = 200


def shown(value: object) -> str:
    """A value as an error message shows it, however large, deep or odd it is."""
    try:
        text = repr(value)
    except Exception:  # too deep, too many digits, or a class of the user's own
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def is_integer(value: object) -> bool:
    """Whether it is an integer of Python or NumPy; ``True`` is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain(value: object) -> object:
    """A number of NumPy as one of Python; anything else as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """An integer in a range.

    Raises:
        InvalidParameterError: it is none, or outside.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InvalidParameterError(name, f"must be an integer, got {shown(value)}")
    whole = int(value)
    if whole < low or (high is not None and whole > high):
        top = "" if high is None else f" and at most {high}"
        raise InvalidParameterError(name, f"must be at least {low}{top}, got {shown(whole)}")
    return whole


def number(name: str, value: object, low: float, high: float, low_open: bool = False) -> float:
    """A finite number in a range.

    Raises:
        InvalidParameterError: it is none, or outside.
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
    """``True`` or ``False``.

    Raises:
        InvalidParameterError: it is neither.
    """
    if not isinstance(value, bool):
        raise InvalidParameterError(name, f"must be a bool, got {shown(value)}")
    return value


def text_name(name: str, value: object, kind: str) -> str:
    """The name of something, such as a model.

    Raises:
        InvalidParameterError: it is no string, or empty.
    """
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(name, f"must name a {kind}, got {shown(value)}")
    return value


def path_name(name: str, value: object, kind: str) -> str:
    """The name of something that may lie in a file or folder, which may be a path object.

    Raises:
        InvalidParameterError: it is neither a string nor a path, or empty.
    """
    return text_name(name, os.fspath(value) if isinstance(value, os.PathLike) else value, kind)


def refuse_deep(name: str, value: object) -> None:
    """Refuse what is nested deeper than :data:`MAX_NESTING` levels of mappings and lists.

    Raises:
        InvalidParameterError: it is.
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


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()
