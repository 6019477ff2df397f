"""Keys and values of past tokens: one row per request, rolled back by moving a number."""

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
    """Key-value cache of one model: ``num_rows`` requests of up to ``capacity`` tokens.

    A row is a fixed region that is reused by the next request. On a CPU the memory of a row is
    touched, and so becomes resident, only as far as tokens are written.

    Attributes:
        num_rows: requests that fit at once.
        capacity: tokens that fit in a row.
        lengths: number of valid tokens in each row, ``[num_rows]`` host integers.
        dtype: type of keys and values.
        device: where they are.
        spare_slot: index of a slot behind all rows that nobody reads, for tokens that only fill up
            a batch.
        hides_stale: nobody reads beyond a row's length, not even to multiply by zero.
        bytes_per_token: memory of one token's keys and values over all layers.
        steps: steps of fixed sizes that were recorded on this cache.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self.lengths = [0] * num_rows
        self.dtype, self.device = dtype, device
        self.spare_slot = num_rows * capacity
        self.hides_stale = False
        self.steps: StaticSteps | None = None
        self._written = [0] * num_rows
        self.bytes_per_token = dtype.itemsize * sum(
            s.num_heads * (s.key_size + s.value_size) for s in layers
        )
        try:
            self._slots = [
                tuple(
                    _zeros((num_rows * capacity + 1, s.num_heads, size), dtype, device)
                    for size in (s.key_size, s.value_size)
                )
                for s in layers
            ]
        except (RuntimeError, MemoryError) as error:
            raise CacheExhaustedError(
                "max_model_len",
                f"no memory for a key-value cache of {num_rows} requests x {capacity} tokens; "
                "lower max_model_len or max_batch_size",
            ) from error
        self._layers = [
            tuple(each[:-1].view(num_rows, capacity, *each.shape[1:]) for each in pair)
            for pair in self._slots
        ]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of packed tokens.

        Args:
            layer: layer index.
            slots: ``[tokens]`` int64, row * capacity + position.
            keys: ``[tokens, heads, key_size]``.
            values: ``[tokens, heads, value_size]``.
        """
        k, v = self._slots[layer]
        k.flatten(1).index_copy_(0, slots, keys.flatten(1))
        v.flatten(1).index_copy_(0, slots, values.flatten(1))

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys ``[slots, heads, key_size]`` and values ``[slots, heads, value_size]``, row by row.

        There are ``num_rows * capacity + 1`` slots, the spare one included.
        """
        k, v = self._slots[layer]
        return k, v

    def read(self, layer: int, first_row: int, end_row: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first ``length`` tokens of a range of rows.

        Returns:
            Keys ``[rows, heads, length, key_size]`` and values ``[rows, heads, length,
            value_size]``.
        """
        k, v = self._layers[layer]
        return (
            k[first_row:end_row, :length].transpose(1, 2),
            v[first_row:end_row, :length].transpose(1, 2),
        )

    def advance(self, row: int, length: int) -> None:
        """Count the tokens of a row that were written, up to ``length``."""
        self.lengths[row] = length
        self._written[row] = max(self._written[row], length)

    def truncate(self, row: int, length: int) -> None:
        """Forget all tokens of a row from ``length`` on, in O(1)."""
        if length < self.lengths[row]:
            self.lengths[row] = length

    def clear(self, row: int) -> None:
        """Hand a row to its next request.

        What was written is overwritten with zeros: a mask hides stale numbers, but not stale NaNs,
        unless :attr:`hides_stale`.
        """
        written = 0 if self.hides_stale else self._written[row]
        for keys, values in self._layers if written else ():
            keys[row, :written].zero_()
            values[row, :written].zero_()
        self.lengths[row] = self._written[row] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, of which a CPU's memory is not touched before it is written."""
    if device.type == "cpu":
        return host_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
