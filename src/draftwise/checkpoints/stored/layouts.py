"""How quantised weights are stored: which tensors belong to a weight, and the weight's values.

All values are computed in float32. Every number is an integer or a short floating-point number,
and every scale has at most 24 significant bits, so that a product is rounded at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The tensors that together store a weight.

    The names of these tensors begin with the same stem. The weight's own name is the stem with
    ``target``.

    Attributes:
        key: end of the name of a tensor that every weight of this layout has, and only those.
        required: ends of the names of the other tensors that every weight has.
        optional: ends of the names of tensors that some weights have.
        target: end of the weight's name.
        expand: computes the weight in float32 of its tensors by the ends of their names.
    """

    key: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    target: str
    expand: Callable[[Parts], Tensor]

    @property
    def ends(self) -> tuple[str, ...]:
        """Ends of the names of all tensors."""
        return (self.key, *self.required, *self.optional)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the integers of a stream of bits, the lowest first, without gaps.

    Args:
        words: ``[..., words]`` int32 or uint8.
        bits: bits of an integer, from 1 to 8.
        count: number of integers.

    Returns:
        ``[..., count]`` uint8.
    """
    stream = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        numbers = stream.unsqueeze(-1) >> shifts & (1 << bits) - 1
        return numbers.flatten(-2)[..., :count]
    first = torch.arange(count) * bits
    at, shift = first // 8, first % 8
    # An integer takes up parts of two bytes at most.
    padded = torch.nn.functional.pad(stream, (0, 1)).short()
    pairs = padded[..., at] | padded[..., at + 1] << 8
    return (pairs >> shift & (1 << bits) - 1).to(torch.uint8)
