"""What the target computed for training rows, kept in memory up to a limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.distillation.documents import Rows
from draftwise.distillation.teacher import Reading, Teacher


class Readings:
    """Readings of training rows. Rows beyond the limit are computed again whenever they are read.

    They are never written to a disk.
    """

    def __init__(self, teacher: Teacher, rows: Rows, gib: float) -> None:
        """Begin without any.

        Args:
            teacher: the target.
            rows: training rows.
            gib: memory for them, in GiB.
        """
        self._teacher, self._rows = teacher, rows
        self._kept: dict[int, Reading] = {}
        self._bytes_left = round(gib * 2**30)

    def of(self, indices: Sequence[int]) -> Reading:
        """The readings of some rows, on the target's device."""
        found = [self._kept.get(index) or self._read(index) for index in indices]
        device = self._teacher.device
        return Reading(
            torch.cat([each.states.to(device) for each in found]),
            torch.cat([each.final.to(device) for each in found]),
        )

    def _read(self, index: int) -> Reading:
        # Alone, so that the result does not depend on the other rows of a pass: a resumed run
        # computes the same values as an uninterrupted one.
        reading = self._teacher.read_trimmed(self._rows.take([index], self._teacher.device))
        size = sum(each.numel() * each.element_size() for each in (reading.states, reading.final))
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._kept[index] = Reading(reading.states.cpu(), reading.final.cpu())
        return reading
