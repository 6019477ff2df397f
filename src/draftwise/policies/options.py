"""Checks of policy options."""

from __future__ import annotations

import math

from draftwise.errors import InvalidParameterError


def number_option(name: str, value: object, low: float, high: float = math.inf) -> float:
    """Return ``value`` if it is a finite number in [low, high].

    Raises:
        InvalidParameterError: it is not; names ``policy_options.NAME``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameterError(
            f"policy_options.{name}", f"must be a finite number, got {value!r}"
        )
    if not low <= value <= high:
        top = f"{high:g}]" if math.isfinite(high) else "∞)"
        raise InvalidParameterError(
            f"policy_options.{name}", f"must lie in [{low:g}, {top}, got {value!r}"
        )
    return float(value)


def integer_option(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` if it is an integer in [low, high]; ``high=None`` sets no upper limit.

    Raises:
        InvalidParameterError: it is not; names ``policy_options.NAME``.
    """
    highest = math.inf if high is None else high
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= highest:
        which = f"≥ {low}" if high is None else f"in {low} … {high}"
        raise InvalidParameterError(
            f"policy_options.{name}", f"must be an integer {which}, got {value!r}"
        )
    return value
