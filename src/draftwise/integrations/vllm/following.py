"""How far a model that is asked now and then has followed each request of another engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Tokens of one request that a pass reads.

    Attributes:
        row: of the request in the engine's batch.
        start: place of the first in the request's text.
        tokens: ``[n]``.
    """

    row: int
    start: int
    tokens: Integers

    @property
    def end(self) -> int:
        """Place behind the last."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Packed:
    """Spans as one pass reads them.

    Attributes:
        rows: ``[spans]`` of the requests.
        starts: ``[spans + 1]`` where each span's tokens begin, and the number of all.
        lengths: ``[spans]`` tokens of each request up to its span's end.
        tokens, positions: ``[tokens]``.
        slots: ``[tokens]`` where keys and values go.
    """

    rows: Integers
    starts: Integers
    lengths: Integers
    tokens: Integers
    positions: Integers
    slots: Integers


def pack(spans: list[Span], blocks: Integers, block_size: int) -> Packed:
    """Lay spans out one behind the other.

    Args:
        spans: at least one, none of them empty.
        blocks: ``[batch, most]`` blocks of keys and values of each request.
        block_size: tokens of a block.
    """
    rows = np.array([span.row for span in spans])
    counts = np.array([len(span.tokens) for span in spans])
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    owners = np.repeat(rows, counts)
    slots = blocks[owners, positions // block_size] * block_size + positions % block_size
    return Packed(
        rows,
        np.concatenate([[0], np.cumsum(counts)]),
        np.array([span.end for span in spans]),
        np.concatenate([span.tokens for span in spans]),
        positions,
        slots,
    )


def in_passes(spans: list[Span], most: int) -> list[list[Span]]:
    """The same spans in passes of at most so many tokens; long ones are cut.

    Each request's tokens come in their order.
    """
    passes: list[list[Span]] = [[]]
    room = most
    for span in spans:
        while len(span.tokens) > room:
            if room:
                passes[-1].append(Span(span.row, span.start, span.tokens[:room]))
                span = Span(span.row, span.start + room, span.tokens[room:])
            passes.append([])
            room = most
        if len(span.tokens):
            passes[-1].append(span)
            room -= len(span.tokens)
    return [each for each in passes if each]


class Follower:
    """Remembers up to where keys and values of each request are there.

    Blocks of a request that was put aside are given to others, and it gets others later: what is
    remembered holds as far as the blocks are the same.
    """

    def __init__(self, block_size: int) -> None:
        """Nothing is followed yet.

        Args:
            block_size: tokens of a block.
        """
        self._block_size = block_size
        self._known: dict[str, tuple[int, Integers]] = {}

    def known(self, name: str, blocks: Integers) -> int:
        """How many tokens of a request are there.

        Args:
            name: of the request.
            blocks: ``[most]`` its blocks now.
        """
        count, then = self._known.get(name, (0, blocks[:0]))
        now = blocks[: len(then)]
        if len(now) < len(then) or not np.array_equal(now, then):
            width = min(len(now), len(then))
            differing = np.flatnonzero(now[:width] != then[:width])
            same = int(differing[0]) if len(differing) else width
            count = min(count, same * self._block_size)
        return count

    def follow(self, name: str, count: int, blocks: Integers) -> None:
        """From now on so many tokens are there."""
        used = -(-count // self._block_size)
        self._known[name] = count, blocks[:used].copy()

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all requests but these."""
        self._known = {name: self._known[name] for name in names if name in self._known}
