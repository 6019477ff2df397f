"""Distributions that tokens are drawn from, by the native kernels where there are some."""

from __future__ import annotations

from torch import Tensor

from draftwise.core.sampling import LogitControls, probabilities
from draftwise.models.native import sampling as native
from draftwise.models.native.library import library_for


def row_probabilities(logits: Tensor, controls: LogitControls, owner: Tensor) -> Tensor:
    """``[rows, vocab]`` float32; see :func:`draftwise.core.sampling.probabilities`.

    PyTorch sorts the whole vocabulary for top-p. The kernels do not.

    Args:
        logits: ``[rows, vocab]``.
        controls: one entry per request, without bias, penalties and masks.
        owner: ``[rows]`` int64 request of each row.
    """
    library = library_for(logits.device)
    if library is None:
        return probabilities(logits, controls.rows(owner))
    return native.distributions(library, logits.float(), controls, owner)
