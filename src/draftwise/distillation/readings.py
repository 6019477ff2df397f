"""What the target computed for training rows, kept in memory up to a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftwise.distillation.documents import Rows
from draftwise.distillation.teacher import Reading, Teacher


class Readings:
    """Readings of training rows. Rows beyond the limit are computed again whenever they are read.

    They are never written to a disk.
    """

    def __init__(
        self, teacher: Teacher, rows: Rows, gib: float, has_log_sums: bool = False
    ) -> None:
        """Begin without any.

        Args:
            teacher: the target.
            rows: training rows.
            gib: memory for them, in GiB.
            has_log_sums: whether :attr:`Reading.log_sums` of the answers are needed. With a large
                vocabulary they take longer than the rest.
        """
        self._teacher, self._rows, self._has_log_sums = teacher, rows, has_log_sums
        self._kept: dict[int, Reading] = {}
        self._bytes_left = round(gib * 2**30)

    def of(self, indices: Sequence[int]) -> Reading:
        """The readings of some rows, on the target's device."""
        found = [self._kept.get(index) or self._read(index) for index in indices]
        device = self._teacher.device
        log_sums = [each.log_sums.to(device) for each in found if each.log_sums is not None]
        return Reading(
            torch.cat([each.states.to(device) for each in found]),
            torch.cat([each.final.to(device) for each in found]),
            torch.cat(log_sums) if log_sums else None,
        )

    def _read(self, index: int) -> Reading:
        # Alone, so that the result does not depend on the other rows of a pass: a resumed run
        # computes the same values as an uninterrupted one.
        row = self._rows.take([index], self._teacher.device)
        reading = self._teacher.read_trimmed(row)
        if self._has_log_sums:
            log_sums = self._teacher.log_sums(reading.final, row.learned_after(1))
            reading = replace(reading, log_sums=log_sums)
        sums = reading.log_sums
        kept = Reading(
            reading.states.cpu(), reading.final.cpu(), None if sums is None else sums.cpu()
        )
        parts = (kept.states, kept.final, kept.log_sums)
        size = sum(each.numel() * each.element_size() for each in parts if each is not None)
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._kept[index] = kept
        return reading
