"""Attention of packed tokens where how far each of them sees is a number on the device.

Nothing about a step is known to the host but its size, so that its kernels can be recorded once
and replayed. Nothing is padded to the longest context.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.kv_cache import KVCache, LayerShape

# Of one request: with more, the flash kernels' large blocks are filled.
_MANY_QUERIES = 32
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_FLASH_CAPABILITY = (8, 0)
# Keys that :class:`TokenwiseAttention` may copy at once, in numbers.
_LARGEST_COPY = 2**28


class RaggedAttention(Protocol):
    """Attends to keys and values that are in the cache already."""

    def attend(self, cache: KVCache, layer: int, q: Tensor, scaling: float | None) -> Tensor:
        """``[tokens, heads, key_size]`` queries to ``[tokens, heads, value_size]``."""


@dataclass(frozen=True)
class FlashAttention:
    """PyTorch's flash kernels for sequences of different lengths, straight on the cache.

    Each request's queries are its newest tokens and see everything up to themselves.

    Attributes:
        query_ends: ``[requests + 1]`` int32, 0 and the running sum of tokens per request.
        first_keys: ``[requests + 1]`` int32, first slot of each request's row; the last is unused.
        num_keys: ``[requests]`` int32, tokens of each row that exist, the new ones included.
        max_queries: at least the most tokens of one request.
        max_keys: at least the most keys of one request.
    """

    query_ends: Tensor
    first_keys: Tensor
    num_keys: Tensor
    max_queries: int
    max_keys: int

    def attend(self, cache: KVCache, layer: int, q: Tensor, scaling: float | None) -> Tensor:
        """See :class:`RaggedAttention`."""
        keys, values = cache.slots(layer)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q,
            keys,
            values,
            self.query_ends,
            self.first_keys,
            self.max_queries,
            self.max_keys,
            0.0,
            True,
            False,
            scale=scaling,
            seqused_k=self.num_keys,
        )[0]
        return out


@dataclass(frozen=True)
class TokenwiseAttention:
    """Every token attends for itself to a copy of its row: slow, for any type and device.

    Attributes:
        first_keys: ``[tokens]`` int64, first slot of each token's row.
        num_keys: ``[tokens]`` int64, keys that it sees, itself included.
        max_keys: the most of them.
    """

    first_keys: Tensor
    num_keys: Tensor
    max_keys: int

    def attend(self, cache: KVCache, layer: int, q: Tensor, scaling: float | None) -> Tensor:
        """See :class:`RaggedAttention`."""
        keys, values = cache.slots(layer)
        tokens, heads, _ = q.shape
        kv_heads = keys.shape[1]
        place = torch.arange(self.max_keys, device=q.device)
        seen = place < self.num_keys.unsqueeze(1)  # [tokens, max_keys]
        # What is not seen must be a number all the same: the row's own first key.
        slots = self.first_keys.unsqueeze(1) + place * seen
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        mask = mask.masked_fill(~seen, float("-inf")).view(tokens, 1, 1, -1)
        out = F.scaled_dot_product_attention(
            q.view(tokens, kv_heads, heads // kv_heads, -1),
            keys[slots].transpose(1, 2),
            values[slots].transpose(1, 2),
            attn_mask=mask,
            scale=scaling,
        )
        return out.reshape(tokens, heads, -1)


@dataclass(frozen=True)
class FusedAttention:
    """The kernel of :mod:`draftwise.models.attention_kernel`, for a few tokens of each request.

    Attributes:
        query_ends, first_keys, num_keys, max_queries, max_keys: as in :class:`FlashAttention`.
    """

    query_ends: Tensor
    first_keys: Tensor
    num_keys: Tensor
    max_queries: int
    max_keys: int

    def attend(self, cache: KVCache, layer: int, q: Tensor, scaling: float | None) -> Tensor:
        """See :class:`RaggedAttention`."""
        from draftwise.models.attention_kernel import attend

        return attend(
            q,
            *cache.slots(layer),
            self.query_ends,
            self.first_keys,
            self.num_keys,
            self.max_queries,
            self.max_keys,
            scaling,
        )


@dataclass(frozen=True)
class RaggedKernels:
    """What there is for a model where it is.

    Attributes:
        fused: whether :class:`FusedAttention` computes it.
        flash: whether :class:`FlashAttention` does.
    """

    fused: bool
    flash: bool

    @classmethod
    def of(
        cls, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
    ) -> RaggedKernels:
        """Find out for a model with such layers."""
        alike = all(s.key_size == s.value_size and s.key_size <= _LARGEST_HEAD for s in layers)
        if device.type != "cuda" or not alike:
            return cls(False, False)
        flash = (
            dtype in _FLASH_DTYPES
            and torch.backends.cuda.is_flash_attention_available()
            and torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY
            and all(shape.key_size % 8 == 0 for shape in layers)
        )
        return cls(importlib.util.find_spec("triton") is not None, flash)

    @property
    def any(self) -> bool:
        """Whether there is one at all."""
        return self.fused or self.flash

    def attention(
        self,
        query_ends: Tensor,
        first_keys: Tensor,
        num_keys: Tensor,
        max_queries: int,
        max_keys: int,
    ) -> RaggedAttention:
        """By the kernel that is faster; the arguments are those of :class:`FlashAttention`."""
        if self.flash and (max_queries > _MANY_QUERIES or not self.fused):
            kind: type[FlashAttention] | type[FusedAttention] = FlashAttention
        else:
            kind = FusedAttention
        return kind(query_ends, first_keys, num_keys, max_queries, max_keys)


def fits_tokenwise(num_tokens: int, capacity: int, layers: Sequence[LayerShape]) -> bool:
    """Whether the copies of :class:`TokenwiseAttention` are of a bearable size."""
    widest = max(s.num_heads * max(s.key_size, s.value_size) for s in layers)
    return num_tokens * capacity * widest <= _LARGEST_COPY
