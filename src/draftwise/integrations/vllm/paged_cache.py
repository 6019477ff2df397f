"""Bookkeeping of computed and missing tokens in a companion's paged KV cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class DraftedRequests:
    """The requests of a batch that have a draft.

    Attributes:
        names: the engine's ids of the requests.
        rows: ``[n]`` rows of the requests in the batch.
        text_lengths: ``[n]`` tokens of each request, prompt and output.
        draft_lengths: ``[n]`` drafted tokens of each request, at least one.
    """

    names: Sequence[str]
    rows: Integers
    text_lengths: Integers
    draft_lengths: Integers


@dataclass(frozen=True)
class Spans:
    """A range of consecutive tokens of each of several requests.

    Attributes:
        rows: ``[n]`` rows of the requests in the batch.
        starts: ``[n]`` positions of the first tokens.
        ends: ``[n]`` positions after the last tokens.
    """

    rows: Integers
    starts: Integers
    ends: Integers

    @property
    def counts(self) -> Integers:
        """``[n]`` number of tokens of each span."""
        return self.ends - self.starts


@dataclass(frozen=True)
class PackedSpans:
    """The tokens of spans, concatenated for one pass.

    Attributes:
        rows: ``[spans]`` rows of the requests in the batch.
        starts: ``[spans + 1]`` index of each span's first token, and the total number of tokens.
        lengths: ``[spans]`` tokens of each request up to the end of its span.
        owners: ``[tokens]`` row of each token's request.
        positions: ``[tokens]`` position of each token in its request.
    """

    rows: Integers
    starts: Integers
    lengths: Integers
    owners: Integers
    positions: Integers


def pack(spans: Spans) -> PackedSpans:
    """Concatenate the tokens of at least one span. No span may be empty."""
    counts = spans.counts
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(starts[-1]) + np.repeat(spans.starts - starts[:-1], counts)
    return PackedSpans(spans.rows, starts, spans.ends, np.repeat(spans.rows, counts), positions)


def slot_mapping(packed: PackedSpans, blocks: Integers, block_size: int) -> Integers:
    """The slot of the KV cache that each token is written to.

    Args:
        packed: the tokens.
        blocks: ``[batch, blocks]`` block table of the batch.
        block_size: tokens per block.

    Returns:
        ``[tokens]``.
    """
    block = blocks[packed.owners, packed.positions // block_size]
    return block * block_size + packed.positions % block_size


def split_into_passes(spans: Spans, max_tokens: int) -> list[Spans]:
    """Distribute spans over passes of at most ``max_tokens`` tokens; long spans are split.

    The order of each request's tokens is kept.
    """
    counts = spans.counts
    before = np.cumsum(counts) - counts
    passes = []
    for first in range(0, int(counts.sum()), max_tokens):
        skipped = np.clip(first - before, 0, counts)
        reached = np.clip(first + max_tokens - before, 0, counts)
        part = reached > skipped
        starts = (spans.starts + skipped)[part]
        passes.append(Spans(spans.rows[part], starts, (spans.starts + reached)[part]))
    return passes


class ComputedTokens:
    """The number of tokens of each request whose keys and values are in the cache.

    A preempted request loses its blocks to others and gets different ones later. The block table is
    therefore recorded as well, and tokens count only up to the first block that differs.
    """

    def __init__(self, block_size: int) -> None:
        """Start with no requests.

        Args:
            block_size: tokens per block.
        """
        self._block_size = block_size
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        self._counts: Integers = np.zeros(0, dtype=np.int64)
        self._blocks: Integers = np.zeros((0, 0), dtype=np.int64)

    def missing(self, drafted: DraftedRequests, blocks: Integers) -> Spans:
        """The tokens that must be computed to score drafts.

        These are the tokens that are not in the cache, and all drafted tokens but the last. A
        text's last token is always computed, as its logits score the first drafted token.

        Args:
            drafted: the requests.
            blocks: ``[n, blocks]`` current block tables of these requests.
        """
        starts = np.minimum(self.counts(drafted.names, blocks), drafted.text_lengths - 1)
        return Spans(drafted.rows, starts, drafted.text_lengths + drafted.draft_lengths - 1)

    def counts(self, names: Sequence[str], blocks: Integers) -> Integers:
        """The number of tokens of each request in the cache.

        Args:
            names: ids of the requests.
            blocks: ``[n, blocks]`` current block tables of these requests.

        Returns:
            ``[n]``.
        """
        places = np.array([self._places.get(name, -1) for name in names], dtype=np.int64)
        counts = np.zeros(len(names), dtype=np.int64)
        known = places >= 0
        if not known.any():
            return counts
        recorded = self._counts[places[known]]
        used = -(-int(recorded.max()) // self._block_size)
        width = min(used, blocks.shape[1])
        same = self._blocks[places[known], :width] == blocks[known, :width]
        num_same = np.cumprod(same, axis=1).sum(axis=1)
        counts[known] = np.minimum(recorded, num_same * self._block_size)
        return counts

    def record(self, names: Sequence[str], counts: Integers, blocks: Integers) -> None:
        """Record that the first ``counts`` tokens of each request are in the cache.

        Args:
            names: ids of the requests.
            counts: ``[n]`` number of tokens.
            blocks: ``[n, blocks]`` current block tables of these requests.
        """
        places = np.array([self._place(name) for name in names], dtype=np.int64)
        width = -(-int(counts.max(initial=0)) // self._block_size)
        self._grow(len(self._places) + len(self._free), width)
        self._counts[places] = counts
        self._blocks[places, :width] = blocks[:, :width]

    def keep_only(self, names: Collection[str]) -> None:
        """Remove all requests except these."""
        for name in self._places.keys() - set(names):
            self._free.append(self._places.pop(name))

    def _place(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = self._free.pop() if self._free else len(self._places)
        return self._places[name]

    def _grow(self, num_places: int, width: int) -> None:
        """Make room for ``num_places`` requests of ``width`` blocks."""
        rows = max(0, num_places - len(self._counts))
        columns = max(0, width - self._blocks.shape[1])
        if rows or columns:
            self._counts = np.pad(self._counts, (0, rows))
            self._blocks = np.pad(self._blocks, ((0, rows), (0, columns)))
