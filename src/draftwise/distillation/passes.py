"""Gradients of a batch of rows, computed in passes that fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwise.distillation.documents import Rows


def backward_in_passes(
    rows: Rows,
    indices: Sequence[int],
    per_pass: int,
    device: torch.device,
    loss_of: Callable[[Sequence[int], Rows], Tensor],
) -> tuple[float, int]:
    """Add the gradients of a batch's mean loss.

    Args:
        rows: all training rows.
        indices: the rows of the batch.
        per_pass: maximum number of rows of a pass.
        device: device of the passes.
        loss_of: the mean loss of some rows, from their indices and the rows themselves.

    Returns:
        The loss, and the number of tokens of the batch.
    """
    total, num_tokens = 0.0, 0
    for first in range(0, len(indices), per_pass):
        chosen = indices[first : first + per_pass]
        part = rows.take(chosen, device)
        loss = loss_of(chosen, part) * (len(chosen) / len(indices))
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        num_tokens += part.num_tokens
    return total, num_tokens
