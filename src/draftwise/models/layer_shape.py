"""What a layer stores of each token, and the tokens that it attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.models.recurrent.shapes import RecurrentShapes


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's keys and values for one token, and the tokens that it attends to.

    Attributes:
        num_heads: key-value heads.
        key_size: size of a key head.
        value_size: size of a value head.
        window: number of newest tokens that a token attends to, its own included; ``None`` for all.
        chunk: size of the chunks of positions to which attention is limited: a token attends to the
            tokens of its own chunk up to itself; ``None`` for no chunks.
        has_plain_scores: whether its scores are the scaled products of queries and keys.
    """

    num_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    chunk: int | None = None
    has_plain_scores: bool = True

    @property
    def span(self) -> int | None:
        """The largest number of tokens that a token attends to; ``None`` for no limit."""
        spans = [span for span in (self.window, self.chunk) if span is not None]
        return min(spans, default=None)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Memory of one token's keys and values."""
        return dtype.itemsize * self.num_heads * (self.key_size + self.value_size)

    @property
    def is_plain(self) -> bool:
        """Whether it computes plain causal attention to all tokens."""
        return self.span is None and self.has_plain_scores

    def first_visible(self, position: int) -> int:
        """The first position that the token at ``position`` attends to."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position - position % self.chunk)
        return first

    def first_visible_of(self, positions: Tensor) -> Tensor:
        """:meth:`first_visible` of each position."""
        first = torch.zeros_like(positions)
        if self.window is not None:
            first = (positions - (self.window - 1)).clamp(min=0)
        if self.chunk is not None:
            first = torch.maximum(first, positions - positions % self.chunk)
        return first


@dataclass(frozen=True)
class CacheShapes:
    """What all layers of a model keep of a request.

    Attributes:
        layers: keys and values by layer. Those of layers without attention are empty.
        recurrent: states and convolution inputs.
    """

    layers: list[LayerShape]
    recurrent: RecurrentShapes
