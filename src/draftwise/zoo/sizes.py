"""Parsing of the size of an inflated model, and the version of the inflation."""

from __future__ import annotations

import math
import re

from draftwise.errors import InvalidParameterError

# Part of the cache key. Increment it whenever the output of ``inflate`` changes for the same input.
INFLATE_VERSION = 2

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmbg]?)")


def parse_num_parameters(text: str) -> int:
    """Read a size such as ``200m``, ``1.5B`` or ``8704128``.

    Raises :class:`InvalidParameterError` for anything else.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise InvalidParameterError(
            "parameters", f"must be a size such as 200m, 1.5b or 8704128, got {text!r}"
        )
    return round(float(match[1]) * _UNITS[match[2]])
