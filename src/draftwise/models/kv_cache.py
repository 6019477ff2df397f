"""Key-value cache of one model: one contiguous cache slot per request, rolled back in O(1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwise.errors import CacheExhaustedError
from draftwise.models.host_memory import host_zeros

if TYPE_CHECKING:
    from draftwise.models.static_steps import StaticSteps


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's keys and values for one token.

    Attributes:
        num_heads: key-value heads.
        key_size: size of a key head.
        value_size: size of a value head.
    """

    num_heads: int
    key_size: int
    value_size: int


class KVCache:
    """Key-value cache of one model: ``num_cache_slots`` requests of up to ``capacity`` tokens.

    A *cache slot* is the fixed region of one request, reused by a later one. It consists of
    ``capacity`` *token slots*, each for the keys and values of one token. On a CPU, memory becomes
    resident only when tokens are written to it.

    Attributes:
        num_cache_slots: maximum number of requests in the cache.
        capacity: token slots in each cache slot.
        lengths: number of valid tokens in each cache slot, ``[num_cache_slots]`` host integers.
        dtype: type of keys and values.
        device: device that holds the cache.
        spare_token_slot: index of a token slot after all cache slots. Padding tokens are written
            there, and it is never read.
        hides_stale: whether attention never reads a cache slot beyond its length, not even under a
            mask.
        bytes_per_token: memory of one token's keys and values over all layers.
        steps: steps of fixed sizes, which use this cache's memory.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_cache_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_cache_slots = num_cache_slots
        self.capacity = capacity
        self.lengths = [0] * num_cache_slots
        self.dtype, self.device = dtype, device
        self.spare_token_slot = num_cache_slots * capacity
        self.hides_stale = False
        self.steps: StaticSteps | None = None
        self._written = [0] * num_cache_slots
        self.bytes_per_token = dtype.itemsize * sum(
            s.num_heads * (s.key_size + s.value_size) for s in layers
        )
        try:
            self._slots = [
                tuple(
                    _zeros((num_cache_slots * capacity + 1, s.num_heads, size), dtype, device)
                    for size in (s.key_size, s.value_size)
                )
                for s in layers
            ]
        except (RuntimeError, MemoryError) as error:
            raise CacheExhaustedError(
                "max_model_len",
                f"no memory for a key-value cache of {num_cache_slots} requests x {capacity} "
                "tokens; lower max_model_len or max_batch_size",
            ) from error
        self._layers = [
            tuple(each[:-1].view(num_cache_slots, capacity, *each.shape[1:]) for each in pair)
            for pair in self._slots
        ]

    def write(self, layer: int, token_slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of packed tokens.

        Args:
            layer: layer index.
            token_slots: ``[tokens]`` int64, cache_slot * capacity + position.
            keys: ``[tokens, heads, key_size]``.
            values: ``[tokens, heads, value_size]``.
        """
        k, v = self._slots[layer]
        k.flatten(1).index_copy_(0, token_slots, keys.flatten(1))
        v.flatten(1).index_copy_(0, token_slots, values.flatten(1))

    def token_slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, by token slot, the spare one included.

        Returns:
            Keys ``[token_slots, heads, key_size]`` and values ``[token_slots, heads, value_size]``,
            with ``token_slots = num_cache_slots * capacity + 1``.
        """
        k, v = self._slots[layer]
        return k, v

    def read(
        self, layer: int, first_cache_slot: int, end_cache_slot: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Views of the first ``length`` tokens of consecutive cache slots.

        Args:
            layer: layer index.
            first_cache_slot: first cache slot.
            end_cache_slot: one past the last cache slot.
            length: tokens to read from each.

        Returns:
            Keys ``[cache_slots, heads, length, key_size]`` and values
            ``[cache_slots, heads, length, value_size]``.
        """
        k, v = self._layers[layer]
        return (
            k[first_cache_slot:end_cache_slot, :length].transpose(1, 2),
            v[first_cache_slot:end_cache_slot, :length].transpose(1, 2),
        )

    def advance(self, cache_slot: int, length: int) -> None:
        """Set the length of a cache slot after its tokens up to ``length`` were written."""
        self.lengths[cache_slot] = length
        self._written[cache_slot] = max(self._written[cache_slot], length)

    def truncate(self, cache_slot: int, length: int) -> None:
        """Drop all tokens of a cache slot from position ``length`` on, in O(1)."""
        if length < self.lengths[cache_slot]:
            self.lengths[cache_slot] = length

    def clear(self, cache_slot: int) -> None:
        """Empty a cache slot for its next request.

        Written tokens are overwritten with zeros unless :attr:`hides_stale`: a mask hides stale
        numbers, but not stale NaNs.
        """
        written = 0 if self.hides_stale else self._written[cache_slot]
        for keys, values in self._layers if written else ():
            keys[cache_slot, :written].zero_()
            values[cache_slot, :written].zero_()
        self.lengths[cache_slot] = self._written[cache_slot] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU, pages become resident only when they are written."""
    if device.type == "cpu":
        return host_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
