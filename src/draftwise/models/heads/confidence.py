"""The confidence head of DSpark, which estimates whether the next token will be accepted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.heads.block_spec import ConfidenceSpec


class ConfidenceHead:
    """σ(w · [h; W1[x]] + b) for a position with output h of the layers, after token x.

    It is the estimated probability that the token at the position is accepted if all before it are.
    It is known before that token is drawn. It is computed in float32.
    """

    def __init__(self, spec: ConfidenceSpec) -> None:
        """Take over a confidence head."""
        self._weight, self._bias = spec.weight.float(), spec.bias.float()
        self._embedding = spec.embedding

    def __call__(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """``[rows]`` float32.

        Args:
            hidden: ``[rows, hidden]`` the output of the layers after the final norm.
            tokens: ``[rows]`` int64, the token before.
        """
        inputs = hidden.float()
        if self._embedding is not None:
            before = F.embedding(tokens, self._embedding)
            inputs = torch.cat((inputs, before.float()), dim=1)
        return torch.sigmoid(F.linear(inputs, self._weight, self._bias)).squeeze(1)
