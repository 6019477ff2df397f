"""Token arrays of documents, and a resumable stream of packed rows sampled from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint16]
TokenRows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenizedSource:
    """Documents of one source, each followed by the end-of-text token.

    tokens: [num_tokens]; starts: [num_documents + 1], document i is tokens[starts[i]:starts[i+1]].
    """

    tokens: Tokens
    starts: npt.NDArray[np.int64]

    @classmethod
    def from_documents(cls, documents: list[list[int]], end_of_text: int = 0) -> TokenizedSource:
        """Concatenate token lists into one array."""
        closed = [np.asarray([*tokens, end_of_text], dtype=np.uint16) for tokens in documents]
        starts = np.cumsum([0, *(len(tokens) for tokens in closed)])
        joined = np.concatenate(closed) if closed else np.zeros(0, dtype=np.uint16)
        return cls(joined, starts.astype(np.int64))


class PackedStream:
    """Infinite stream of packed rows, each a window of consecutive tokens of one source.

    The source of a row is sampled by weight. The windows of a source are visited in random order,
    so the rows of a batch come from different documents, and every epoch has different window
    boundaries. The state is a few counters (:meth:`state_dict`), so a resumed run continues with
    exactly the same rows.
    """

    def __init__(
        self, sources: Mapping[str, TokenizedSource], weights: Mapping[str, float], seed: int
    ) -> None:
        self._names = [name for name in weights if len(sources[name].tokens) > 1]
        total = sum(weights[name] for name in self._names)
        self._p_sources = [weights[name] / total for name in self._names]
        self._sources = sources
        self._seed = seed
        self._num_rows = 0
        # Number of windows read so far, by source and window length.
        self._num_drawn: dict[tuple[str, int], int] = {}
        self._orders: dict[tuple[str, int], tuple[int, npt.NDArray[np.int64]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream."""
        return {"num_rows": self._num_rows, "num_drawn": dict(self._num_drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position returned by :meth:`state_dict`."""
        self._num_rows = int(state["num_rows"])
        self._num_drawn = dict(state["num_drawn"])

    def epochs(self) -> dict[str, float]:
        """Number of epochs of each source so far."""
        num_tokens = dict.fromkeys(self._names, 0)
        for (name, length), count in self._num_drawn.items():
            num_tokens[name] += length * count
        return {name: num_tokens[name] / len(self._sources[name].tokens) for name in self._names}

    def rows(self, num_rows: int, length: int) -> TokenRows:
        """Return the next rows, [num_rows, length + 1]; the last token of each is a label only."""
        return np.stack([self._row(length) for _ in range(num_rows)])

    def _row(self, length: int) -> TokenRows:
        generator = np.random.default_rng((self._seed, 0, self._num_rows))
        name = self._names[int(generator.choice(len(self._names), p=self._p_sources))]
        self._num_rows += 1
        tokens = self._sources[name].tokens
        num_windows = max(1, len(tokens) // length)
        count = self._num_drawn.get((name, length), 0)
        self._num_drawn[name, length] = count + 1
        epoch, index = divmod(count, num_windows)
        start = self._order(name, length, epoch, num_windows)[index]
        # Wrap around, as a source may be shorter than a row.
        window = np.take(tokens, np.arange(start, start + length + 1), mode="wrap")
        return window.astype(np.int64)

    def _order(self, name: str, length: int, epoch: int, num_windows: int) -> npt.NDArray[np.int64]:
        """Start positions of the windows of an epoch, in visiting order."""
        cached = self._orders.get((name, length))
        if cached is None or cached[0] != epoch:
            seed = (self._seed, 1 + self._names.index(name), length, epoch)
            generator = np.random.default_rng(seed)
            starts = generator.permutation(num_windows) * length + generator.integers(length)
            cached = (epoch, starts)
            self._orders[name, length] = cached
        return cached[1]


def held_out_rows(source: TokenizedSource, length: int, max_tokens: int) -> TokenRows:
    """Split a source of at least two tokens into rows, [num_rows, length + 1], without its tail.

    If the source is shorter than ``length``, its length is used instead.
    """
    length = min(length, len(source.tokens) - 1)
    num_rows = min(len(source.tokens) // (length + 1), max(1, max_tokens // length))
    return source.tokens[: num_rows * (length + 1)].reshape(num_rows, length + 1).astype(np.int64)
