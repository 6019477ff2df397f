"""Documents to train on, their packing into rows of equal length, and their vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
_PADDING = -1


@dataclass(frozen=True)
class Document:
    """One sequence of tokens that the target reads from its beginning.

    Attributes:
        tokens: a prompt and the target's answer, or a piece of a text.
        num_prompt_tokens: tokens of the prompt, which are read and not learned; 0 for a text.
        temperature: temperature of the answer; ``None`` for a text that was given.
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int = 0
    temperature: float | None = None


@dataclass(frozen=True)
class Rows:
    """Packed documents. A document never attends to another one in its row.

    Attributes:
        tokens: ``[rows, length]`` token ids; 0 where there is no document.
        positions: ``[rows, length]`` position of each token in its document.
        documents: ``[rows, length]`` number of the document; -1 where there is none.
        is_learned: ``[rows, length]`` whether the token is one of an answer or of a text.
        temperatures: ``[rows, length]`` temperature of the answer; NaN where there is none.
    """

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    is_learned: Tensor
    temperatures: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Sequence[int] | Tensor, device: torch.device | None = None) -> Rows:
        """Some of the rows, on a device."""
        index = torch.as_tensor(rows)
        return Rows(*(column[index].to(device) for column in self._columns))

    def first(self, length: int) -> Rows:
        """The first columns of the rows."""
        return Rows(*(column[:, :length] for column in self._columns))

    def learned_after(self, offset: int) -> Tensor:
        """``[rows, length]`` whether the token ``offset`` places later is learned.

        It must belong to the same document.
        """
        is_same = shifted(self.documents, offset, -2) == self.documents
        return shifted(self.is_learned, offset, 0) & is_same

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return self.tokens, self.positions, self.documents, self.is_learned, self.temperatures

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int((self.documents != _PADDING).sum())


def shifted(x: Tensor, by: int, fill: float = 0) -> Tensor:
    """Move columns to the left: ``out[:, t] = x[:, t + by]``, and ``fill`` beyond the end.

    ``[rows, length, …]`` -> the same shape.
    """
    rest = x.new_full((len(x), min(by, x.shape[1]), *x.shape[2:]), fill)
    return torch.cat([x[:, by:], rest], dim=1)


def pack_documents(documents: Sequence[Document], length: int) -> Rows:
    """Pack documents into rows, the longest first, each into the fullest row that has room.

    Args:
        documents: at least one document; tokens beyond ``length`` are dropped.
        length: tokens per row.
    """
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i].tokens), i))
    # Indices of the rows by the room that they have left.
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    members: list[list[int]] = []
    for index in order:
        need = min(len(documents[index].tokens), length)
        room = next((room for room in range(need, length + 1) if by_room[room]), None)
        if room is None:
            members.append([])
            row, room = len(members) - 1, length
        else:
            row = by_room[room].pop()
        members[row].append(index)
        by_room[room - need].append(row)
    shape = len(members), length
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    numbers, learned = np.full(shape, _PADDING, np.int64), np.zeros(shape, bool)
    temperatures = np.full(shape, np.nan, np.float32)
    for row, indices in enumerate(members):
        start = 0
        for index in indices:
            document = documents[index]
            own = document.tokens[:length]
            end = start + len(own)
            tokens[row, start:end] = own
            positions[row, start:end] = np.arange(len(own))
            numbers[row, start:end] = index
            learned[row, start + document.num_prompt_tokens : end] = True
            if document.temperature is not None:
                temperatures[row, start:end] = document.temperature
            start = end
        # Positions go on in the padding, which keeps it one document of its own.
        positions[row, start:] = np.arange(length - start)
    arrays = (tokens, positions, numbers, learned, temperatures)
    return Rows(*(torch.from_numpy(array) for array in arrays))


@dataclass(frozen=True)
class Unpacked:
    """Places of packed documents in rows of their own, which padding follows.

    Attributes:
        rows: ``[rows, length]`` the document's row of each token.
        columns: ``[rows, length]`` its place there.
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, packed: Rows) -> Unpacked:
        """The places of all documents; padding counts as a document."""
        begins = packed.positions == 0
        return cls(begins.flatten().cumsum(0).view(begins.shape) - 1, packed.positions)

    def inputs(self, packed: Rows) -> tuple[Tensor, Tensor]:
        """``[documents, longest]`` tokens and positions."""
        shape = int(self.rows.max()) + 1, int(self.columns.max()) + 1
        tokens = packed.tokens.new_zeros(shape)
        tokens[self.rows, self.columns] = packed.tokens
        return tokens, torch.arange(shape[1], device=tokens.device).expand(shape)

    def packed(self, x: Tensor) -> Tensor:
        """``[documents, longest, hidden]`` -> ``[rows, length, hidden]``."""
        return x[self.rows, self.columns]


class RowStream:
    """Infinite stream of row numbers; every epoch visits all rows in an order of its own.

    The state is one counter, so a resumed run continues with exactly the same rows.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        """Create the stream at its beginning."""
        self._num_rows = num_rows
        self._seed = seed
        self._count = 0
        self._order: tuple[int, Ints] | None = None

    @property
    def epochs(self) -> float:
        """Number of epochs so far."""
        return self._count / self._num_rows

    def next(self, num_rows: int) -> list[int]:
        """The next row numbers."""
        return [self._next() for _ in range(num_rows)]

    def _next(self) -> int:
        epoch, index = divmod(self._count, self._num_rows)
        self._count += 1
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(self._num_rows)
        return int(self._order[1][index])

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream."""
        return {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position returned by :meth:`state_dict`."""
        self._count = int(state["count"])


def save_documents(path: Path, documents: Sequence[Document]) -> None:
    """Write documents to a ``.npz`` file, replacing it atomically."""
    temporary = path.with_suffix(".tmp.npz")
    nan = float("nan")
    np.savez(
        temporary,
        tokens=np.array([token for each in documents for token in each.tokens], np.int64),
        lengths=np.array([len(each.tokens) for each in documents], np.int64),
        num_prompt_tokens=np.array([each.num_prompt_tokens for each in documents], np.int64),
        temperatures=np.array(
            [nan if each.temperature is None else each.temperature for each in documents]
        ),
    )
    temporary.replace(path)


def load_documents(path: Path) -> list[Document]:
    """Read documents written by :func:`save_documents`."""
    with np.load(path) as arrays:
        pieces = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
        return [
            Document(tuple(tokens.tolist()), int(count), None if np.isnan(t) else float(t))
            for tokens, count, t in zip(
                pieces, arrays["num_prompt_tokens"], arrays["temperatures"], strict=True
            )
        ]


def choose_draft_tokens(
    documents: Sequence[Document], size: int, vocab_size: int, always: Iterable[int] = ()
) -> Tensor:
    """Choose the tokens that a head can propose.

    Tokens of answers come first, by frequency, then tokens of prompts, then the lowest ids, which
    are the most frequent ones in most vocabularies.

    Args:
        documents: training documents.
        size: number of tokens to choose; at least ``vocab_size`` chooses all tokens.
        vocab_size: the target's number of tokens.
        always: tokens that are always chosen, such as the end of a text.

    Returns:
        ``[min(size, vocab_size)]`` int64 ids of the target, ascending.
    """
    if size >= vocab_size:
        return torch.arange(vocab_size)
    # Prompts weigh less than any answer, but more than no occurrence.
    weights = torch.zeros(vocab_size, dtype=torch.float64)
    num_tokens = sum(len(each.tokens) for each in documents)
    for learned, weight in ((True, 1.0), (False, 0.5 / (1 + num_tokens))):
        chosen = [
            token
            for each in documents
            for token in (
                each.tokens[each.num_prompt_tokens :]
                if learned
                else each.tokens[: each.num_prompt_tokens]
            )
        ]
        counts = torch.bincount(torch.tensor(chosen, dtype=torch.long), minlength=vocab_size)
        weights += weight * counts
    for token in always:
        weights[token] = float("inf")
    order = torch.argsort(weights, descending=True, stable=True)
    return order[:size].sort().values


def coverage(documents: Sequence[Document], target_ids: Tensor) -> float:
    """Share of the tokens of answers and texts that a head can propose."""
    tokens = [token for each in documents for token in each.tokens[each.num_prompt_tokens :]]
    found = torch.isin(torch.tensor(tokens, dtype=torch.long), target_ids)
    return float(found.double().mean()) if tokens else 0.0
