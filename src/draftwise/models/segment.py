"""New tokens of one request in a pass."""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """Consecutive new tokens of one request.

    Attributes:
        cache_slot: the request's place in the cache.
        start: position of the first new token.
        num_tokens: number of new tokens.
    """

    cache_slot: int
    start: int
    num_tokens: int
