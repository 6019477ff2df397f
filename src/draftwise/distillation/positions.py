"""Training on the target's whole distribution at every position of its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from draftwise.distillation.documents import Rows, RowStream
from draftwise.distillation.passes import backward_in_passes
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.distillation.unrolled import shifted
from draftwise.training.losses import Loss, mean_loss
from draftwise.training.schedule import Schedule

# Bytes of the logits of one pass, with and without gradients alike.
_MAX_LOGIT_BYTES = 2**28

Trained = TypeVar("Trained", bound=nn.Module)


class PositionTask(ABC, Generic[Trained]):
    """Trains a draft that reads the text itself on the target's distributions.

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

    @abstractmethod
    def logits(self, rows: Rows, reading: Reading, mask: Tensor) -> Tensor:
        """``[n, vocab]`` the draft's logits of the next token.

        Args:
            rows: the rows.
            reading: what the target computed for them.
            mask: ``[rows, length]`` the ``n`` positions.
        """

    def backward(self, progress: float) -> tuple[float, int]:
        """See :class:`draftwise.training.loop.Task`."""
        length = self._rows.tokens.shape[1]
        num_rows = max(1, self._schedule.batch_tokens // length)
        self.model.train()
        per_pass = max(1, _MAX_LOGIT_BYTES // (4 * length * self._teacher.vocab_size))
        return backward_in_passes(
            self._rows,
            self.stream.next(num_rows),
            per_pass,
            self._teacher.device,
            lambda indices, rows: self.loss(rows),
        )

    def loss(self, rows: Rows) -> Tensor:
        """Mean loss of the positions whose next token is one of an answer or a text."""
        mask = shifted(rows.is_learned, 1, 0) & (shifted(rows.documents, 1, -2) == rows.documents)
        if not bool(mask.any()):
            return torch.zeros((), device=self._teacher.device)
        reading = self._teacher.read(rows)
        p = self._teacher.logits(reading.final[mask]).float().softmax(dim=-1)
        logits = self.logits(rows, reading, mask)
        return mean_loss(self._loss, logits, p, torch.arange(len(p), device=p.device))

    def state_dict(self) -> dict[str, Any]:
        """Position in the data."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position returned by :meth:`state_dict`."""
        self.stream.load_state_dict(state)
