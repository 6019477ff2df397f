"""Memory for blocks of consecutive tokens outside the slots of a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.errors import CacheExhaustedError
from draftwise.models.host_memory import cache_zeros
from draftwise.models.kv_cache import KVCache


class CacheBlocks:
    """Keys and values of blocks, which are copied from cache slots and back."""

    def __init__(self, cache: KVCache, num_blocks: int, block_size: int) -> None:
        """Allocate memory.

        Args:
            cache: the cache.
            num_blocks: number of blocks.
            block_size: tokens of a block. It divides the size of every ring.

        Raises:
            CacheExhaustedError: there is not enough memory.
        """
        self._cache, self._block_size = cache, block_size
        try:
            # Of each layer, ``[num_blocks, block_size, heads, size]``.
            self._memory = [
                tuple(
                    cache_zeros(
                        (num_blocks, block_size, layer.num_heads, size), cache.dtype, cache.device
                    )
                    for size in (layer.key_size, layer.value_size)
                )
                for layer in cache.layers
            ]
        except (RuntimeError, MemoryError) as error:
            raise CacheExhaustedError(
                "enable_prefix_caching", f"no memory for {num_blocks} blocks of {block_size} tokens"
            ) from error

    def store(self, cache_slot: int, first: int, places: Sequence[int]) -> None:
        """Copy consecutive blocks of a cache slot to memory.

        Args:
            cache_slot: the cache slot.
            first: number of blocks before the first one.
            places: index of each block in the memory.
        """
        if not places:
            return
        device = self._cache.device
        to = torch.tensor(places, device=device)
        for index, memory in enumerate(self._memory):
            for stored, numbers in zip(memory, self._cache.by_slot(index), strict=True):
                rows = self._in_blocks(numbers[cache_slot])
                at = torch.arange(first, first + len(places), device=device) % len(rows)
                stored.index_copy_(0, to, rows[at])

    def restore(self, cache_slot: int, first: int, places: Sequence[int]) -> None:
        """Copy blocks from memory to consecutive tokens of a cache slot.

        Layers with a ring get only the blocks that the tokens after them attend to. The caller
        advances the cache slot.

        Args:
            cache_slot: the cache slot.
            first: number of blocks before the first one.
            places: index of each block in the memory.
        """
        cache, block_size = self._cache, self._block_size
        end = first + len(places)
        for index, memory in enumerate(self._memory):
            start = first
            if cache.sizes[index] < cache.capacity:
                needed = cache.layers[index].first_visible(end * block_size) // block_size
                if needed > first:
                    start = needed
                    cache.restored_from(cache_slot, needed * block_size)
            chosen = torch.tensor(places[start - first :], device=cache.device, dtype=torch.long)
            for stored, numbers in zip(memory, cache.by_slot(index), strict=True):
                rows = self._in_blocks(numbers[cache_slot])
                at = torch.arange(start, end, device=cache.device) % len(rows)
                rows.index_copy_(0, at, stored[chosen])

    def _in_blocks(self, tokens: Tensor) -> Tensor:
        """``[blocks, block_size, heads, width]``, a view of the whole blocks of a cache slot."""
        size = self._block_size
        return tokens[: len(tokens) // size * size].unflatten(0, (-1, size))  # type: ignore[no-untyped-call, no-any-return]
