"""Checks of policy options."""

from __future__ import annotations

import math

from draftwise.values import integer, number


def number_option(name: str, value: object, low: float, high: float = math.inf) -> float:
    """Return ``value`` if it is a finite number in [low, high].

    Raises:
        InvalidParameterError: it is not; names ``policy_options.NAME``.
    """
    return number(f"policy_options.{name}", value, low, high)


def integer_option(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` if it is an integer in [low, high]; ``high=None`` sets no upper limit.

    Raises:
        InvalidParameterError: it is not; names ``policy_options.NAME``.
    """
    return integer(f"policy_options.{name}", value, low, high)
