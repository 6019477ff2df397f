"""Attention of packed tokens with sequence lengths that are kept on the device.

The host passes sizes only, so that the kernels can be captured as a CUDA graph and replayed.
Keys are not padded to the longest context.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.tree_tokens import TreePlaces

# With more queries per request than this, the flash kernels fill their large blocks and are faster.
_MANY_QUERIES = 32
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_FLASH_CAPABILITY = (8, 0)
# Maximum number of elements of keys that :class:`TokenwiseAttention` may copy at once.
_LARGEST_COPY = 2**28


class RaggedAttention(Protocol):
    """Causal attention to keys and values that are in the cache already."""

    def attend(self, cache: KVCache, layer: int, q: Tensor, scores: Scores) -> Tensor:
        """Compute one layer's attention.

        Args:
            cache: the model's cache.
            layer: layer index.
            q: ``[tokens, heads, key_size]``.
            scores: how scores are computed.

        Returns:
            ``[tokens, heads, value_size]``.
        """


@dataclass(frozen=True)
class TokenwiseAttention:
    """Attention of every token to its own copy of its keys: slow, for any dtype and device.

    Attributes:
        first_keys: ``[tokens]`` int64, first token slot of each token's request in layers without a
            ring.
        num_keys: ``[tokens]`` int64, tokens of the request up to the token, which is included.
        max_keys: upper bound of ``num_keys``.
    """

    first_keys: Tensor
    num_keys: Tensor
    max_keys: int

    def attend(self, cache: KVCache, layer: int, q: Tensor, scores: Scores) -> Tensor:
        """See :class:`RaggedAttention`."""
        keys, values = cache.token_slots(layer)
        shape = cache.layers[layer]
        tokens, heads, _ = q.shape
        kv_heads = keys.shape[1]
        width = self.max_keys if shape.span is None else min(self.max_keys, shape.span)
        first = shape.first_visible_of(self.num_keys - 1)
        offset = torch.arange(width, device=q.device)
        seen = offset < (self.num_keys - first).unsqueeze(1)  # [tokens, width]
        # Masked keys must still be finite: they are copies of the first key that is attended to.
        position = first.unsqueeze(1) + offset * seen
        places = cache.in_layer(layer, self.first_keys.unsqueeze(1) + position, position)
        k, v = keys[places].transpose(1, 2), values[places].transpose(1, 2)
        grouped = q.view(tokens, kv_heads, heads // kv_heads, -1)
        if scores.is_plain:
            mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
            mask = mask.masked_fill(~seen, float("-inf")).view(tokens, 1, 1, -1)
            out = F.scaled_dot_product_attention(
                grouped, k, v, attn_mask=mask, scale=scores.scaling
            )
        else:
            out = scores.attend(grouped.unsqueeze(3), k, v, ~seen.view(tokens, 1, 1, 1, -1))
        return out.reshape(tokens, heads, -1)


@dataclass(frozen=True)
class FusedAttention:
    """The kernel of :mod:`draftwise.kernels.triton.attention`, for few tokens per request.

    Each request's queries are its newest tokens.

    Attributes:
        query_ends: ``[requests + 1]`` int32, 0 and the cumulative number of tokens per request.
        first_keys: ``[requests + 1]`` int32, first token slot of each request in layers without a
            ring. The last entry is not used.
        num_keys: ``[requests]`` int32, tokens of each request so far, the new ones included.
        max_queries: upper bound of the tokens of one request.
        max_keys: upper bound of ``num_keys``.
        trees: places of the tokens in token trees; ``None`` without trees.
    """

    query_ends: Tensor
    first_keys: Tensor
    num_keys: Tensor
    max_queries: int
    max_keys: int
    trees: TreePlaces | None = None

    def attend(self, cache: KVCache, layer: int, q: Tensor, scores: Scores) -> Tensor:
        """See :class:`RaggedAttention`."""
        from draftwise.kernels.triton.attention import attend

        return attend(
            q,
            cache,
            layer,
            self.query_ends,
            self.first_keys,
            self.num_keys,
            self.max_queries,
            self.max_keys,
            scores,
            self.trees,
        )


@dataclass(frozen=True)
class FlashAttention(FusedAttention):
    """PyTorch's flash attention kernels for sequences of different lengths, in plain layers.

    They read keys and values directly from the cache. Other layers use the kernel of the base
    class, as the flash kernels know neither rings nor other scores.
    """

    def attend(self, cache: KVCache, layer: int, q: Tensor, scores: Scores) -> Tensor:
        """See :class:`RaggedAttention`."""
        if not cache.layers[layer].is_plain:
            return super().attend(cache, layer, q, scores)
        keys, values = cache.token_slots(layer)
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
            scale=scores.scaling,
            seqused_k=self.num_keys,
        )[0]
        return out


@dataclass(frozen=True)
class RaggedKernels:
    """The attention kernels that support a model on its device.

    Attributes:
        fused: whether :class:`FusedAttention` supports it.
        flash: whether :class:`FlashAttention` supports it. Without ``fused``, that is only where
            all layers are plain.
    """

    fused: bool
    flash: bool

    @classmethod
    def of(
        cls, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
    ) -> RaggedKernels:
        """Determine the kernels for a model with these layers."""
        alike = all(s.key_size == s.value_size and s.key_size <= _LARGEST_HEAD for s in layers)
        if device.type != "cuda" or not alike:
            return cls(False, False)
        fused = importlib.util.find_spec("triton") is not None
        flash = (
            dtype in _FLASH_DTYPES
            and torch.backends.cuda.is_flash_attention_available()
            and torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY
            and all(s.key_size % 8 == 0 and (fused or s.is_plain) for s in layers)
        )
        return cls(fused, flash)

    @property
    def any(self) -> bool:
        """Whether any kernel supports the model."""
        return self.fused or self.flash

    def attention(
        self,
        query_ends: Tensor,
        first_keys: Tensor,
        num_keys: Tensor,
        max_queries: int,
        max_keys: int,
        trees: TreePlaces | None = None,
    ) -> RaggedAttention:
        """Attention by the faster kernel. The arguments are those of :class:`FusedAttention`.

        Token trees need :attr:`fused`.
        """
        if trees is not None:
            return FusedAttention(query_ends, first_keys, num_keys, max_queries, max_keys, trees)
        if self.flash and (max_queries > _MANY_QUERIES or not self.fused):
            return FlashAttention(query_ends, first_keys, num_keys, max_queries, max_keys)
        return FusedAttention(query_ends, first_keys, num_keys, max_queries, max_keys)


def fits_tokenwise(num_tokens: int, capacity: int, layers: Sequence[LayerShape]) -> bool:
    """Whether :class:`TokenwiseAttention` may copy the keys of ``num_tokens`` tokens."""
    most = max(
        min(capacity, s.span or capacity) * s.num_heads * max(s.key_size, s.value_size)
        for s in layers
    )
    return num_tokens * most <= _LARGEST_COPY
