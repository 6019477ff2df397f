"""The tokens of the corpus, and a resumable stream of packed rows sampled from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from draftwise.zoo.corpus import read_documents
from draftwise.zoo.recipe import END_OF_TEXT_ID

# The documents of a source, one after the other.
Tokens = npt.NDArray[np.uint16]
TokenRows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Training and held-out parts of every source."""

    training: Mapping[str, Tokens]
    held_out: Mapping[str, Tokens]


def joined(documents: Iterable[Sequence[int]]) -> Tokens:
    """Concatenate documents, each followed by the end-of-text token."""
    closed = [np.asarray([*tokens, END_OF_TEXT_ID], dtype=np.uint16) for tokens in documents]
    return np.concatenate([np.zeros(0, dtype=np.uint16), *closed])


def load_corpus(
    runs: Path, data: Path | None, tokenizer: PreTrainedTokenizerFast, sources: Iterable[str]
) -> Corpus:
    """Tokenize ``sources``, or read the tokens cached in ``runs`` by a run with this tokenizer.

    Raises ``FileNotFoundError`` if there is no cache and ``data`` is None.
    """
    folder = runs / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True).encode("utf-8")
    fingerprint = hashlib.sha256(vocabulary).hexdigest()[:16]
    training: dict[str, Tokens] = {}
    held_out: dict[str, Tokens] = {}
    for source in sources:
        path = folder / f"{source}-{fingerprint}.npz"
        if not path.exists():
            if data is None:
                raise FileNotFoundError(f"{path}: run the training stage first")
            _write_tokens(path, source, data, tokenizer)
        with np.load(path) as arrays:
            training[source], held_out[source] = arrays["tokens"], arrays["held_out_tokens"]
    return Corpus(training, held_out)


def _write_tokens(path: Path, source: str, data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts: dict[bool, list[str]] = {False: [], True: []}
    for document in read_documents(source, data):
        texts[document.is_held_out].append(document.text)
    training, held_out = (
        joined(item.ids for item in tokenizer.backend_tokenizer.encode_batch(texts[part]))
        for part in (False, True)
    )
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, tokens=training, held_out_tokens=held_out)
    temporary.replace(path)


class PackedStream:
    """Infinite stream of packed rows, each a window of consecutive tokens of one source.

    The source of a row is sampled by weight. The windows of a source are visited in random order,
    so the rows of a batch come from different documents, and every epoch has different window
    boundaries. The state is a few counters (:meth:`state_dict`), so a resumed run continues with
    exactly the same rows.
    """

    def __init__(
        self, sources: Mapping[str, Tokens], weights: Mapping[str, float], seed: int
    ) -> None:
        self._names = [name for name in weights if len(sources[name]) > 1]
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
        return {name: num_tokens[name] / len(self._sources[name]) for name in self._names}

    def rows(self, num_rows: int, length: int) -> TokenRows:
        """Return the next rows, [num_rows, length + 1]; the last token of each is a label only."""
        return np.stack([self._row(length) for _ in range(num_rows)])

    def _row(self, length: int) -> TokenRows:
        generator = np.random.default_rng((self._seed, 0, self._num_rows))
        name = self._names[int(generator.choice(len(self._names), p=self._p_sources))]
        self._num_rows += 1
        tokens = self._sources[name]
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


def held_out_rows(tokens: Tokens, length: int, max_tokens: int) -> TokenRows:
    """Split at least two tokens of a source into rows, [num_rows, length + 1], without its tail.

    If the source is shorter than ``length``, its length is used instead.
    """
    length = min(length, len(tokens) - 1)
    num_rows = min(len(tokens) // (length + 1), max(1, max_tokens // length))
    return tokens[: num_rows * (length + 1)].reshape(num_rows, length + 1).astype(np.int64)
