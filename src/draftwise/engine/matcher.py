"""Tracks which tokens may come next in a text constrained by a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwise.errors import DraftwiseError, InvalidParameterError, NumericalError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# One bit per token. Token 0 is the lowest bit of the first byte.
Bits = NDArray[np.uint8]
_NOTHING_FOLLOWS = "the target has no token that the grammar allows next"


class _Position(NamedTuple):
    """A position in a text.

    Attributes:
        allowed: ``[bytes]`` bits of the tokens that are allowed at the position.
        is_end: whether only an end-of-sequence token is allowed.
        was_read: whether the grammar has consumed the token before the position. It consumes no
            tokens after the end of the text.
        problem: why the text cannot be continued; empty if it can.
    """

    allowed: Bits
    is_end: bool
    was_read: bool
    problem: str = ""


class Matcher:
    """Tracks the text of one request and the tokens drafted after it.

    Positions after the text are cached while drafts pass through them. So each position is computed
    once for the draft, the companion and the target.

    Attributes:
        is_complete: whether nothing can follow the text.
        error: why the text cannot be continued; ``None`` if it can.
    """

    def __init__(self, start: LLMatcher, eos_token_ids: frozenset[int], field: str) -> None:
        """Start with an empty text.

        Args:
            start: the grammar in its initial state. It is copied and not changed.
            eos_token_ids: tokens that end a text.
            field: the request parameter with the grammar, named in errors.
        """
        self._start = start
        self._grammar: LLMatcher = start.deep_copy()
        self._eos_token_ids = eos_token_ids
        self._field = field
        self._committed: list[int] = []
        self._drafted: list[int] = []
        self._eos = token_bits(eos_token_ids, len(self._grammar.compute_bitmask()))
        self._positions = [self._here()]
        self.is_complete = False
        self.error = self._error(self._positions[0])

    def allowed(self, drafted: Sequence[int]) -> Bits:
        """``[bytes]`` bits of the tokens that may follow the text and the drafted tokens."""
        return self._position(drafted).allowed

    def is_end(self, drafted: Sequence[int]) -> bool:
        """Whether only an end-of-sequence token may follow the text and the drafted tokens."""
        return self._position(drafted).is_end

    def take(self, token: int) -> bool:
        """Append a token to the text. Returns False if that is impossible; see :attr:`error`."""
        if not _has(self._positions[0].allowed, token):
            self.error = NumericalError(
                "target", f"gives probability 0 to every token that {self._field} allows"
            )
            return False
        position = self._position([token])
        self.error = self._error(position)
        if token in self._eos_token_ids:
            return True  # the request ends
        self._committed.append(token)
        del self._drafted[0], self._positions[0]
        self.is_complete = position.is_end
        return self.error is None

    def _position(self, drafted: Sequence[int]) -> _Position:
        known = 0
        for token, before in zip(drafted, self._drafted, strict=False):
            if token != before:
                break
            known += 1
        if known < len(drafted):
            self._go_back(known)
            for token in drafted[known:]:
                self._advance(token)
        return self._positions[len(drafted)]

    def _advance(self, token: int) -> None:
        position = self._positions[-1]
        self._drafted.append(token)
        # A forbidden token is never accepted, so positions after it are never used.
        if position.is_end or token in self._eos_token_ids or not _has(position.allowed, token):
            self._positions.append(_Position(self._eos, True, False))
            return
        self._grammar.consume_token(token)
        self._positions.append(self._here())

    def _go_back(self, count: int) -> None:
        """Discard all but the first ``count`` drafted tokens."""
        num_read = sum(position.was_read for position in self._positions[count + 1 :])
        del self._drafted[count:], self._positions[count + 1 :]
        if not num_read:
            return
        if self._grammar.is_error() or not self._grammar.rollback(num_read):
            self._grammar = self._start.deep_copy()
            read = [position.was_read for position in self._positions[1:]]
            self._grammar.consume_tokens(self._committed + self._drafted[: sum(read)])

    def _here(self) -> _Position:
        """The grammar's current position."""
        allowed: Bits = np.frombuffer(self._grammar.compute_bitmask(), dtype=np.uint8)
        if self._grammar.is_error():
            return _Position(self._eos, True, True, _problem(self._grammar.get_error()))
        others = allowed & ~self._eos
        if self._grammar.is_accepting():
            return _Position(allowed, not others.any(), True)
        if others.any():
            return _Position(others, False, True)
        return _Position(self._eos, True, True, _NOTHING_FOLLOWS)

    def _error(self, position: _Position) -> DraftwiseError | None:
        if not position.problem:
            return None
        return InvalidParameterError(self._field, f"cannot be followed: {position.problem}")


def _problem(message: str) -> str:
    """llguidance's message, without its dump of the parser state."""
    return _NOTHING_FOLLOWS if "NoExtension" in message else message.strip().partition("\n")[0]


@lru_cache
def token_bits(tokens: frozenset[int], size: int) -> Bits:
    """``[size]`` bytes with the bits of the given tokens set."""
    return np.packbits(np.isin(np.arange(8 * size), list(tokens)), bitorder="little")


def _has(bits: Bits, token: int) -> bool:
    return token < 8 * len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)
