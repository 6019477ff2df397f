"""The training objective of a head, as a task of the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwise.distillation.documents import Rows, RowStream
from draftwise.distillation.head import Eagle3Head
from draftwise.distillation.passes import backward_in_passes
from draftwise.distillation.teacher import Reading, Teacher
from draftwise.distillation.unrolled import shifted, unroll
from draftwise.training.losses import Loss, mean_loss
from draftwise.training.schedule import Schedule

STEP_DECAY = 0.8


class Readings:
    """What the target computed for the training rows, kept in memory up to a limit.

    Rows beyond the limit are computed again in every epoch. Nothing is written to a disk.
    """

    def __init__(self, teacher: Teacher, rows: Rows, max_bytes: int) -> None:
        """Create an empty store.

        Args:
            teacher: the target.
            rows: all training rows.
            max_bytes: largest size of the store.
        """
        self._teacher = teacher
        self._rows = rows
        self._left = max_bytes
        self._kept: dict[int, Reading] = {}

    def read(self, indices: Sequence[int]) -> Reading:
        """Hidden states of some rows, on the teacher's device."""
        found = [self._kept.get(index) or self._compute(index) for index in indices]
        device = self._teacher.device
        return Reading(
            torch.cat([each.states.to(device) for each in found]),
            torch.cat([each.final.to(device) for each in found]),
        )

    def _compute(self, index: int) -> Reading:
        # Alone, so that the result does not depend on the other rows of a micro-batch: a resumed
        # run computes the same values as an uninterrupted one.
        reading = self._teacher.read_trimmed(self._rows.take([index], self._teacher.device))
        size = sum(each.numel() * each.element_size() for each in (reading.states, reading.final))
        if size <= self._left:
            self._left -= size
            self._kept[index] = Reading(reading.states.cpu(), reading.final.cpu())
        return reading


class HeadTask:
    """Trains a head on the target's distributions, by chains of several steps.

    The target's distribution at a position is its softmax over the draft's tokens. Every position
    counts whose next token the draft can propose. For an answer sampled at temperature 1 that is in
    expectation the cross entropy to the target's whole distribution: a position counts with the
    probability of the draft's tokens. For a greedy answer it is EAGLE-3's mask of positions whose
    best token lies outside.

    A chain ends where a token lies outside the draft's vocabulary, as drafting would.

    Attributes:
        model: the head.
        stream: numbers of the training rows.
    """

    def __init__(
        self,
        head: Eagle3Head,
        teacher: Teacher,
        rows: Rows,
        target_ids: Tensor,
        schedule: Schedule,
        loss: Loss,
        num_steps: int,
        readings: Readings,
        embedding: Tensor,
        seed: int,
    ) -> None:
        """Create the task at the beginning of its data.

        Args:
            head: the head, on the teacher's device.
            teacher: the target.
            rows: training rows.
            target_ids: ``[draft_vocab]`` the target's ids of the head's tokens.
            schedule: gives the sizes of a batch.
            loss: loss of a position.
            num_steps: steps of each chain.
            readings: the target's states of ``rows``.
            embedding: ``[vocab, hidden]`` the embedding that the head reads.
            seed: seed of the order of the rows.
        """
        self.model = head
        self.stream = RowStream(len(rows), seed)
        self._teacher = teacher
        self._rows = rows
        self._target_ids = target_ids.to(teacher.device)
        self._is_in_draft = torch.zeros(teacher.vocab_size, dtype=torch.bool, device=teacher.device)
        self._is_in_draft[self._target_ids] = True
        self._schedule = schedule
        self._loss = loss
        self._num_steps = num_steps
        self._readings = readings
        self._embedding = embedding

    def backward(self, progress: float) -> tuple[float, int]:
        """See :class:`draftwise.training.loop.Task`."""
        length = self._rows.tokens.shape[1]
        num_rows = max(1, self._schedule.batch_tokens // length)
        micro_rows = max(1, min(num_rows, self._schedule.micro_batch_tokens // length))
        return backward_in_passes(
            self._rows,
            self.stream.next(num_rows),
            micro_rows,
            self._teacher.device,
            lambda indices, rows: self.loss(rows, self._readings.read(indices)),
        )

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
        p = self._distributions(reading.final[needed])
        place = torch.cumsum(needed.flatten(), 0).view(needed.shape) - 1
        use_bfloat16 = reading.states.dtype == torch.bfloat16
        weights = [STEP_DECAY**depth for depth in range(self._num_steps)]
        with torch.autocast(self._teacher.device.type, torch.bfloat16, enabled=use_bfloat16):
            chains = unroll(
                self.model, rows, reading.states, self._embedding, masks[0], self._num_steps
            )
            for step, mask, weight in zip(chains, masks, weights, strict=True):
                if not bool(mask.any()):
                    break
                # A chain that learns a step has learned all earlier ones.
                logits = self.model.logits(step.out[mask[masks[0]]])
                labels = shifted(place, step.depth + 1)[mask]
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

    def _distributions(self, final: Tensor) -> Tensor:
        """``[n, hidden]`` -> ``[n, draft_vocab]`` the target's softmax on the draft's tokens."""
        return self._teacher.logits(final, self._target_ids).float().softmax(dim=-1)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position returned by :meth:`state_dict`."""
        self.stream.load_state_dict(state)
