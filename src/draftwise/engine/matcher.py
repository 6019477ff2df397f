"""Which tokens may come next in a text that must have a given form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.errors import DraftwiseError, InvalidParameterError, NumericalError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# One bit per token, the first token's the lowest of the first byte.
Bits = NDArray[np.uint8]
_NOTHING_FOLLOWS = "the target has no token that could come next"


class _Place(NamedTuple):
    """A place in a text.

    Attributes:
        allowed: ``[bytes]`` tokens that may come there.
        is_end: nothing but the end of the text may.
        was_read: whether the grammar has read the token before it; it reads none behind an end.
        problem: why no text leads on from here; empty where one does.
    """

    allowed: Bits
    is_end: bool
    was_read: bool
    problem: str = ""


class Matcher:
    """Follows the text of one request, and what is drafted behind it.

    The places behind the text are kept as long as drafts run along them, so draft, companion and
    target see the same ones, worked out once.

    Attributes:
        is_complete: nothing can follow the text.
        error: why the text cannot be gone on with; ``None`` while it can.
    """

    def __init__(self, start: LLMatcher, eos_token_ids: frozenset[int], field: str) -> None:
        """Begin with an empty text.

        Args:
            start: the grammar, which has read nothing; it stays so.
            eos_token_ids: tokens that end a text.
            field: the parameter that it came from, named in errors.
        """
        self._start = start
        self._grammar: LLMatcher = start.deep_copy()
        self._eos_token_ids = eos_token_ids
        self._field = field
        self._said: list[int] = []
        self._drafted: list[int] = []
        self._eos = token_bits(eos_token_ids, len(self._grammar.compute_bitmask()))
        self._places = [self._here()]
        self.is_complete = False
        self.error = self._error(self._places[0])

    def allowed(self, drafted: Sequence[int]) -> Bits:
        """Which tokens may come behind the text and drafted ones: ``[bytes]``, a bit per token."""
        return self._place(drafted).allowed

    def is_end(self, drafted: Sequence[int]) -> bool:
        """Whether nothing but the end of the text may come behind it and drafted tokens."""
        return self._place(drafted).is_end

    def take(self, token: int) -> bool:
        """Go on by a token of the text for good; False if that cannot be, see :attr:`error`."""
        if not _has(self._places[0].allowed, token):
            self.error = NumericalError(
                "target", f"gives nothing to any token that {self._field} allows"
            )
            return False
        place = self._place([token])
        self.error = self._error(place)
        if token in self._eos_token_ids:
            return True  # the request ends
        self._said.append(token)
        del self._drafted[0], self._places[0]
        self.is_complete = place.is_end
        return self.error is None

    def _place(self, drafted: Sequence[int]) -> _Place:
        known = 0
        for token, before in zip(drafted, self._drafted, strict=False):
            if token != before:
                break
            known += 1
        if known < len(drafted):
            self._go_back(known)
            for token in drafted[known:]:
                self._go_on(token)
        return self._places[len(drafted)]

    def _go_on(self, token: int) -> None:
        place = self._places[-1]
        self._drafted.append(token)
        # A token that may not come is no part of any text: whatever follows is never looked at.
        if place.is_end or token in self._eos_token_ids or not _has(place.allowed, token):
            self._places.append(_Place(self._eos, True, False))
            return
        self._grammar.consume_token(token)
        self._places.append(self._here())

    def _go_back(self, count: int) -> None:
        """Forget all but so many drafted tokens."""
        num_read = sum(place.was_read for place in self._places[count + 1 :])
        del self._drafted[count:], self._places[count + 1 :]
        if not num_read:
            return
        if self._grammar.is_error() or not self._grammar.rollback(num_read):
            self._grammar = self._start.deep_copy()
            read = [place.was_read for place in self._places[1:]]
            self._grammar.consume_tokens(self._said + self._drafted[: sum(read)])

    def _here(self) -> _Place:
        """The place that the grammar has come to."""
        allowed: Bits = np.frombuffer(self._grammar.compute_bitmask(), dtype=np.uint8)
        if self._grammar.is_error():
            return _Place(self._eos, True, True, _problem(self._grammar.get_error()))
        others = allowed & ~self._eos
        if self._grammar.is_accepting():
            return _Place(allowed, not others.any(), True)
        if others.any():
            return _Place(others, False, True)
        return _Place(self._eos, True, True, _NOTHING_FOLLOWS)

    def _error(self, place: _Place) -> DraftwiseError | None:
        if not place.problem:
            return None
        return InvalidParameterError(self._field, f"cannot be followed: {place.problem}")


def _problem(message: str) -> str:
    """What llguidance has to say, without its state."""
    return _NOTHING_FOLLOWS if "NoExtension" in message else message.strip().partition("\n")[0]


@lru_cache
def token_bits(tokens: frozenset[int], size: int) -> Bits:
    """``[size]`` bytes with the bits of some tokens."""
    return np.packbits(np.isin(np.arange(8 * size), list(tokens)), bitorder="little")


def _has(bits: Bits, token: int) -> bool:
    return token < 8 * len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)
