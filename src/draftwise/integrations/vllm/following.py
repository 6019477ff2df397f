"""How far a model that is asked now and then has followed each request of another engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Drafted:
    """The requests of a batch that have a draft.

    Attributes:
        names: by which the engine knows them.
        rows: ``[n]`` of each in the batch.
        text_lengths: ``[n]`` tokens of each, prompt and output.
        draft_lengths: ``[n]`` drafted tokens of each, at least one.
    """

    names: Sequence[str]
    rows: Integers
    text_lengths: Integers
    draft_lengths: Integers


@dataclass(frozen=True)
class Spans:
    """Tokens of some requests, of each those from one place of its text up to before another.

    Attributes:
        rows: ``[n]`` of the requests in the engine's batch.
        starts: ``[n]`` places of the first tokens.
        ends: ``[n]`` places behind the last ones.
    """

    rows: Integers
    starts: Integers
    ends: Integers

    @property
    def counts(self) -> Integers:
        """``[n]`` tokens of each."""
        return self.ends - self.starts


@dataclass(frozen=True)
class Packed:
    """Spans as one pass reads them, one behind the other.

    Attributes:
        rows: ``[spans]`` of the requests.
        starts: ``[spans + 1]`` where each span's tokens begin, and the number of all.
        lengths: ``[spans]`` tokens of each request up to its span's end.
        owners: ``[tokens]`` rows of the requests that they belong to.
        positions: ``[tokens]`` their places.
    """

    rows: Integers
    starts: Integers
    lengths: Integers
    owners: Integers
    positions: Integers


def pack(spans: Spans) -> Packed:
    """Lay spans out one behind the other; at least one, none of them empty."""
    counts = spans.counts
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(starts[-1]) + np.repeat(spans.starts - starts[:-1], counts)
    return Packed(spans.rows, starts, spans.ends, np.repeat(spans.rows, counts), positions)


def slots_of(packed: Packed, blocks: Integers, block_size: int) -> Integers:
    """Where keys and values of each token go.

    Args:
        packed: the tokens.
        blocks: ``[batch, most]`` blocks of keys and values of each request.
        block_size: tokens of a block.

    Returns:
        ``[tokens]``.
    """
    block = blocks[packed.owners, packed.positions // block_size]
    return block * block_size + packed.positions % block_size


def in_passes(spans: Spans, most: int) -> list[Spans]:
    """The same spans in passes of at most so many tokens; long ones are cut.

    Each request's tokens come in their order.
    """
    counts = spans.counts
    before = np.cumsum(counts) - counts
    passes = []
    for first in range(0, int(counts.sum()), most):
        skipped = np.clip(first - before, 0, counts)
        reached = np.clip(first + most - before, 0, counts)
        part = reached > skipped
        starts = (spans.starts + skipped)[part]
        passes.append(Spans(spans.rows[part], starts, (spans.starts + reached)[part]))
    return passes


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
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        self._counts: Integers = np.zeros(0, dtype=np.int64)
        self._blocks: Integers = np.zeros((0, 0), dtype=np.int64)

    def unread(self, drafted: Drafted, blocks: Integers) -> Spans:
        """What must be read to judge drafts: what was not yet, and all of the draft but its end.

        The last token of a text is read in any case: the first drafted one is judged after it.

        Args:
            drafted: the requests.
            blocks: ``[n, most]`` blocks of each of them now.
        """
        starts = np.minimum(self.known(drafted.names, blocks), drafted.text_lengths - 1)
        return Spans(drafted.rows, starts, drafted.text_lengths + drafted.draft_lengths - 1)

    def known(self, names: Sequence[str], blocks: Integers) -> Integers:
        """How many tokens of each request are there.

        Args:
            names: of the requests.
            blocks: ``[n, most]`` blocks of each now.

        Returns:
            ``[n]``.
        """
        places = np.array([self._places.get(name, -1) for name in names], dtype=np.int64)
        counts = np.zeros(len(names), dtype=np.int64)
        met = places >= 0
        if not met.any():
            return counts
        remembered = self._counts[places[met]]
        used = -(-int(remembered.max()) // self._block_size)
        width = min(used, blocks.shape[1])
        same = self._blocks[places[met], :width] == blocks[met, :width]
        num_same = np.cumprod(same, axis=1).sum(axis=1)
        counts[met] = np.minimum(remembered, num_same * self._block_size)
        return counts

    def follow(self, names: Sequence[str], counts: Integers, blocks: Integers) -> None:
        """From now on so many tokens of each request are there.

        Args:
            names: of the requests.
            counts: ``[n]`` tokens.
            blocks: ``[n, most]`` blocks of each now.
        """
        places = np.array([self._place(name) for name in names], dtype=np.int64)
        width = -(-int(counts.max(initial=0)) // self._block_size)
        self._grow(len(self._places) + len(self._free), width)
        self._counts[places] = counts
        self._blocks[places, :width] = blocks[:, :width]

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all requests but these."""
        for name in self._places.keys() - set(names):
            self._free.append(self._places.pop(name))

    def _place(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = self._free.pop() if self._free else len(self._places)
        return self._places[name]

    def _grow(self, num_places: int, width: int) -> None:
        """Room for so many requests of so many blocks."""
        rows = max(0, num_places - len(self._counts))
        columns = max(0, width - self._blocks.shape[1])
        if rows or columns:
            self._counts = np.pad(self._counts, (0, rows))
            self._blocks = np.pad(self._blocks, ((0, rows), (0, columns)))
