"""Training on packed rows of documents, as tasks of the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from draftwise.distillation.documents import Rows, RowStream, shifted
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.training.losses import Loss, mean_loss
from draftwise.training.schedule import Schedule

# Bytes of the logits of one pass, with and without gradients alike.
MAX_LOGIT_BYTES = 2**28

Trained = TypeVar("Trained", bound=nn.Module)


class RowTask(ABC, Generic[Trained]):
    """Trains a model on packed rows; a :class:`draftwise.training.loop.Task`.

    Attributes:
        model: what is trained.
        stream: numbers of the training rows.
    """

    def __init__(
        self,
        model: Trained,
        teacher: Teacher,
        rows: Rows,
        schedule: Schedule,
        loss: Loss,
        seed: int,
    ) -> None:
        """Create the task at the beginning of its data.

        Args:
            model: what is trained, on the teacher's device.
            teacher: the target.
            rows: training rows.
            schedule: gives the sizes of a batch.
            loss: loss of a position.
            seed: seed of the order of the rows.
        """
        self.model: Trained = model
        self.stream = RowStream(len(rows), seed)
        self._teacher = teacher
        self._rows = rows
        self._schedule = schedule
        self._loss = loss

    @property
    @abstractmethod
    def rows_per_pass(self) -> int:
        """Maximum number of rows of a pass, so that it fits in memory."""

    @abstractmethod
    def loss_of(self, indices: Sequence[int], rows: Rows) -> Tensor:
        """Mean loss of some rows, from their indices and the rows themselves."""

    def backward(self, progress: float) -> tuple[float, int]:
        """See :class:`draftwise.training.loop.Task`."""
        self.model.train()
        length = self._rows.tokens.shape[1]
        indices = self.stream.next(max(1, self._schedule.batch_tokens // length))
        total, num_tokens = 0.0, 0
        for first in range(0, len(indices), self.rows_per_pass):
            chosen = indices[first : first + self.rows_per_pass]
            part = self._rows.take(chosen, self._teacher.device)
            loss = self.loss_of(chosen, part) * (len(chosen) / len(indices))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            num_tokens += part.num_tokens
        return total, num_tokens

    def state_dict(self) -> dict[str, Any]:
        """Position in the data."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position returned by :meth:`state_dict`."""
        self.stream.load_state_dict(state)


class PositionTask(RowTask[Trained]):
    """Trains a draft that reads the text itself on the target's distributions."""

    @abstractmethod
    def logits(self, rows: Rows, reading: Reading, mask: Tensor) -> Tensor:
        """``[n, vocab]`` the draft's logits of the next token.

        Args:
            rows: the rows.
            reading: what the target computed for them.
            mask: ``[rows, length]`` the ``n`` positions.
        """

    @property
    def rows_per_pass(self) -> int:
        """As many as have logits that fit in memory."""
        length = self._rows.tokens.shape[1]
        return max(1, MAX_LOGIT_BYTES // (4 * length * self._teacher.vocab_size))

    def loss_of(self, indices: Sequence[int], rows: Rows) -> Tensor:
        """Mean loss of the positions whose next token is one of an answer or a text."""
        mask = rows.learned_after(1)
        if not bool(mask.any()):
            return torch.zeros((), device=self._teacher.device)
        reading = self._teacher.read(rows)
        p = self._teacher.logits(reading.final[mask]).float().softmax(dim=-1)
        logits = self.logits(rows, reading, mask)
        return mean_loss(self._loss, logits, p, torch.arange(len(p), device=p.device))


def along_text(states: Tensor, begins: Tensor, num_steps: int) -> Iterator[Tensor]:
    """The states from which a draft that reads the text itself proposes each token of a chain.

    Such a draft reads no output of its own, so the state of a step is that of a later position.

    Args:
        states: ``[rows, length, hidden]`` what the draft computed along the text.
        begins: ``[rows, length]`` whether a chain begins at the position.
        num_steps: steps of each chain.

    Yields:
        For each step, ``[num_chains, hidden]``.
    """
    for depth in range(num_steps):
        yield shifted(states, depth + 1)[begins]
