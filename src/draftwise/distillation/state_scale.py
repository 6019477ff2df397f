"""The size of a target's hidden states, by which what reads them is scaled for training."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.distillation.documents import Rows
from draftwise.distillation.teacher import Teacher

_SMALLEST_SCALE = 1e-3
# Rows from which the scale is measured.
_NUM_ROWS = 8


@torch.no_grad()
def state_scale(teacher: Teacher, rows: Rows) -> Tensor:
    """``[num_states * hidden]`` root mean square of each channel of the target's states.

    It is measured on the first rows. The first token of a document is left out, as some models give
    it states that are larger by orders of magnitude.
    """
    squares, count = torch.zeros((), dtype=torch.float64, device=teacher.device), 0
    for index in range(min(len(rows), _NUM_ROWS)):
        row = rows.take([index], teacher.device)
        mask = (row.documents >= 0) & (row.positions > 0)
        states = teacher.read(row).states[mask].double()
        squares = squares + states.square().sum(dim=0)
        count += len(states)
    return (squares / max(count, 1)).sqrt().float().clamp(min=_SMALLEST_SCALE)
