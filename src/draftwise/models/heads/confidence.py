"""The confidence head of DSpark, which estimates whether the next token will be accepted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.heads.block_spec import ConfidenceSpec


class ConfidenceHead:
    """σ((w · [h; W1[x]] + b) / T) for a position with output h of the layers, after token x.

    T is the temperature of the position, 1 where a head has none. The result is the estimated
    probability that the token at the position is accepted if all before it are. It is known before
    that token is drawn. It is computed in float32.
    """

    def __init__(self, spec: ConfidenceSpec) -> None:
        """Take over a confidence head."""
        self._weight, self._bias = spec.weight.float(), spec.bias.float()
        self._embedding, self._temperatures = spec.embedding, spec.temperatures

    def __call__(self, hidden: Tensor, tokens: Tensor, position: int) -> Tensor:
        """``[rows]`` float32.

        Args:
            hidden: ``[rows, hidden]`` the output of the layers after the final norm.
            tokens: ``[rows]`` int64, the token before.
            position: number of the token in the block, from 0 on.
        """
        inputs = hidden.float()
        if self._embedding is not None:
            before = F.embedding(tokens, self._embedding)
            inputs = torch.cat((inputs, before.float()), dim=1)
        logits = F.linear(inputs, self._weight, self._bias).squeeze(1)
        return torch.sigmoid(logits / self._temperatures[position])
