"""Training of what reads states of the target, by chains of several steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftwise.distillation.documents import Rows, shifted
from draftwise.distillation.readings import Readings
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.tasks import RowTask, Trained
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.training.losses import LOSSES, mean_loss
from draftwise.training.schedule import Schedule

STEP_DECAY = 0.8


class ChainTask(RowTask[Trained]):
    """Trains a draft on the target's distributions, by chains of several steps.

    The target's distribution at a position is its softmax over the draft's tokens. Every position
    counts whose next token the draft can propose. For an answer sampled at temperature 1 that is in
    expectation the cross entropy to the target's whole distribution: a position counts with the
    probability of the draft's tokens. For a greedy answer it is EAGLE-3's mask of positions whose
    best token lies outside.

    A chain ends where a token lies outside the draft's vocabulary, as drafting would.

    What the target computed for the rows is kept in memory, see :class:`Readings`.
    """

    def __init__(
        self,
        model: Trained,
        teacher: Teacher,
        rows: Rows,
        target_ids: Tensor,
        schedule: Schedule,
        settings: TrainingSettings,
    ) -> None:
        """Create the task at the beginning of its data.

        Args:
            model: what is trained, on the teacher's device.
            teacher: the target.
            rows: training rows.
            target_ids: ``[draft_vocab]`` the target's ids of the draft's tokens.
            schedule: gives the sizes of a batch.
            settings: the loss, the steps of each chain, the memory for readings, and the seed.
        """
        super().__init__(model, teacher, rows, schedule, LOSSES[settings.loss], settings.seed)
        self._target_ids = target_ids.to(teacher.device)
        self._is_in_draft = torch.zeros(teacher.vocab_size, dtype=torch.bool, device=teacher.device)
        self._is_in_draft[self._target_ids] = True
        self._num_steps = settings.num_steps
        self._readings = Readings(teacher, rows, settings.state_gib)

    @abstractmethod
    def outputs(self, rows: Rows, reading: Reading, begins: Tensor) -> Iterator[Tensor]:
        """What the draft computes in each step of its chains.

        Args:
            rows: packed rows.
            reading: what the target computed for them.
            begins: ``[rows, length]`` whether a chain begins at the position.

        Yields:
            For each step k, ``[num_chains, hidden]``. In a chain from the true state of position t,
            they predict the token at t + 2 + k.
        """

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """``[n, hidden]`` outputs -> ``[n, draft_vocab]``."""

    @property
    def rows_per_pass(self) -> int:
        """As the schedule says."""
        return max(1, self._schedule.micro_batch_tokens // self._rows.tokens.shape[1])

    def loss_of(self, indices: Sequence[int], rows: Rows) -> Tensor:
        """See :class:`RowTask`."""
        return self.loss(rows, self._readings.of(indices))

    def loss(self, rows: Rows, reading: Reading) -> Tensor:
        """Loss of packed rows: the mean of each step, weighted by :data:`STEP_DECAY` ** k."""
        masks = [self._learned(rows, depth) for depth in range(self._num_steps)]
        total = torch.zeros((), device=self._teacher.device)
        if not bool(masks[0].any()):
            return total
        # Positions whose distribution some step learns.
        needed = torch.zeros_like(masks[0])
        for depth, mask in enumerate(masks):
            needed[:, depth + 1 :] |= mask[:, : -(depth + 1)]
        # [n, draft_vocab] the target's softmax on the draft's tokens.
        p = self._teacher.logits(reading.final[needed], self._target_ids).float().softmax(dim=-1)
        place = torch.cumsum(needed.flatten(), 0).view(needed.shape) - 1
        weights = [STEP_DECAY**depth for depth in range(self._num_steps)]
        with reading.autocast():
            outs = self.outputs(rows, reading, masks[0])
            for depth, (out, mask, weight) in enumerate(zip(outs, masks, weights, strict=True)):
                if not bool(mask.any()):
                    break
                # A chain that learns a step has learned all earlier ones.
                logits = self.logits(out[mask[masks[0]]])
                labels = shifted(place, depth + 1)[mask]
                total = total + weight * mean_loss(self._loss, logits, p, labels)
        return total / sum(weights)

    def _learned(self, rows: Rows, depth: int) -> Tensor:
        """``[rows, length]`` whether the chain of a position learns its step ``depth``."""
        good = rows.is_learned & self._is_in_draft[rows.tokens]
        learned = torch.ones_like(good)
        for offset in range(2, depth + 3):
            learned = learned & shifted(good, offset, 0)
        # Documents are contiguous, so the last token decides.
        return learned & (shifted(rows.documents, depth + 2, -2) == rows.documents)
