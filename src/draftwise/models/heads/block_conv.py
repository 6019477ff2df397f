"""The convolutions of DFlash-2 along the rows of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from draftwise.models.blocked_linear import join_linear
from draftwise.models.heads.block_spec import ConvolutionSpec


class BlockConvolution:
    """Convolutions in front of and behind a part of a layer, with coefficients of each row.

    Of the part's normalised input z, row i gives the deviations δ_i = P z_i for both sides, each
    tap t and each group of numbers. A side maps rows y to Σ_t (K_t + δ_{i,t}) ⊙ y_{i−t}, with 0 for
    rows before the block.
    """

    def __init__(self, spec: ConvolutionSpec, block_size: int) -> None:
        """Take over the convolutions. The linear layer loses its weights."""
        self._base, self._block_size = spec.base, block_size
        self._projection = join_linear([spec.projection])
        self._groups = spec.base.shape[2] // spec.group_size

    def enter(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the input of the part.

        Args:
            normed: ``[block rows, hidden]``.

        Returns:
            ``[block rows, hidden]``, and the deviations ``[block rows, taps, groups]`` of the other
            side.
        """
        taps = self._base.shape[1]
        deviations = self._projection(normed).view(len(normed), 2, taps, self._groups)
        return self._convolved(normed, 0, deviations[:, 0]), deviations[:, 1]

    def leave(self, out: Tensor, deviations: Tensor) -> Tensor:
        """Convolve the output of the part, ``[block rows, hidden]``."""
        return self._convolved(out, 1, deviations)

    def _convolved(self, rows: Tensor, side: int, deviations: Tensor) -> Tensor:
        size, groups = self._block_size, self._groups
        blocks = rows.view(-1, size, groups, rows.shape[1] // groups)
        result = blocks.new_zeros(blocks.shape)
        for tap, base in enumerate(self._base[side]):
            before = F.pad(blocks[:, : size - tap], (0, 0, 0, 0, tap, 0))
            own = deviations[:, tap].reshape(-1, size, groups, 1)
            result = result + (base.view(groups, -1) + own) * before
        return result.view(rows.shape)
