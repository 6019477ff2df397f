"""Keys and values of past tokens: one row per request, rolled back by moving a number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwise.errors import CacheExhaustedError

_CACHE_LINE_BYTES = 64


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
        bytes_per_token: memory of one token's keys and values over all layers.
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
        self._written = [0] * num_rows
        self.bytes_per_token = dtype.itemsize * sum(
            s.num_heads * (s.key_size + s.value_size) for s in layers
        )
        try:
            self._layers = [
                tuple(
                    _zeros((num_rows, capacity, s.num_heads, size), dtype, device)
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

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of packed tokens.

        Args:
            layer: layer index.
            slots: ``[tokens]`` int64, row * capacity + position.
            keys: ``[tokens, heads, key_size]``.
            values: ``[tokens, heads, value_size]``.
        """
        k, v = self._layers[layer]
        k.view(-1, k.shape[2] * k.shape[3]).index_copy_(0, slots, keys.flatten(1))
        v.view(-1, v.shape[2] * v.shape[3]).index_copy_(0, slots, values.flatten(1))

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

        What was written is overwritten with zeros: a mask hides stale numbers, but not stale NaNs.
        """
        for keys, values in self._layers:
            keys[row, : self._written[row]].zero_()
            values[row, : self._written[row]].zero_()
        self.lengths[row] = self._written[row] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory, on a CPU, is not touched before it is written and starts a cache line."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    flat = np.zeros(size + _CACHE_LINE_BYTES - 1, dtype=np.uint8)
    first = -flat.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(flat[first : first + size]).view(dtype).view(shape)
