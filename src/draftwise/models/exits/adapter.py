"""The adapter of an exit: a small map of the residual stream for the exit's logits only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.models.decoder_spec import NormSpec
from draftwise.models.norm import Norm

# The rank is padded with zeros to a multiple of this, as the kernels' tiles need.
_RANK_STEP = 32


class ExitAdapter:
    """h + U D norm(h), where h is the residual stream at an exit.

    The final norm and the head of the target read the result. The stream that the target's other
    layers continue from is h.

    Attributes:
        norm: the norm, with a weight of its own.
        down: D, from the hidden size to the padded rank.
        up: U, from the padded rank to the hidden size.
    """

    def __init__(
        self, norm: Tensor, down: Tensor, up: Tensor, epsilon: float, dtype: torch.dtype
    ) -> None:
        """Take over trained weights.

        Args:
            norm: ``[hidden]`` weight of the norm.
            down: ``[rank, hidden]``.
            up: ``[hidden, rank]``.
            epsilon: added to the mean square in the norm.
            dtype: dtype of the target.
        """
        self.norm = NormSpec(norm.float().contiguous(), epsilon)
        missing = -len(down) % _RANK_STEP
        self.down = _linear(F.pad(down, (0, 0, 0, missing)), dtype)
        self.up = _linear(F.pad(up, (0, missing)), dtype)
        self._norm = Norm(self.norm, dtype)

    @property
    def rank(self) -> int:
        """The rank, with its padding."""
        return self.down.out_features

    @property
    def num_parameters(self) -> int:
        """Number of weights, with their padding."""
        return self.down.weight.numel() + self.up.weight.numel() + len(self.norm.weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """What the final norm reads in place of ``[..., hidden]``."""
        out: Tensor = hidden + self.up(self.down(self._norm(hidden)))
        return out


def _linear(weight: Tensor, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)
    return layer
