"""How the attention scores of a layer are computed from queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """How a layer computes attention scores.

    Attributes:
        scaling: factor of the scores; ``None`` for 1/√key_size.
        softcap: the scores are limited to ±softcap by softcap·tanh(score / softcap); ``None`` for
            no limit (Gemma 2).
        sinks: ``[heads]`` a further score of each head, whose weight is discarded; ``None`` for
            none (gpt-oss).
    """

    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the scores are the scaled products of queries and keys."""
        return self.softcap is None and self.sinks is None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, is_hidden: Tensor) -> Tensor:
        """Attention with any kind of scores, in PyTorch's operations.

        Args:
            q: ``[..., kv_heads, group, tokens, key_size]``.
            keys: ``[..., kv_heads, keys, key_size]``.
            values: ``[..., kv_heads, keys, value_size]``.
            is_hidden: whether a token does not attend to a key, of a shape that broadcasts to
                ``[..., kv_heads, group, tokens, keys]``.

        Returns:
            ``[..., kv_heads, group, tokens, value_size]``.
        """
        scaling = q.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores = (q @ keys.unsqueeze(-3).mT).float() * scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.float().view(keys.shape[-3], -1, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(dim=-1)
        if self.sinks is not None:
            weights = weights[..., :-1]
        return weights.to(values.dtype) @ values.unsqueeze(-3)
