"""Stored states: the recurrent layers of a request at the end of a block of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.models.memory import cache_zeros
from draftwise.models.recurrent.cache import RecurrentCache
from draftwise.models.recurrent.computation import state_at


class Snapshots:
    """Memory for the states and convolution inputs of ``count`` positions of requests."""

    def __init__(self, cache: RecurrentCache, count: int) -> None:
        """Allocate memory. On a CPU, it becomes resident when it is written."""
        self._cache = cache

        def like(memory: Tensor, *shape: int) -> Tensor:
            return cache_zeros((count, *shape), memory.dtype, memory.device)

        self._states = [like(each, *each.shape[1:]) for each in cache.states]
        self._inputs = [
            like(ring, shape.width - 1, shape.channels)
            for ring, shape in zip(cache.inputs, cache.shapes.convolutions, strict=True)
        ]

    @staticmethod
    def num_bytes(cache: RecurrentCache) -> int:
        """Memory of one position."""
        states = sum(each.num_bytes for each in cache.shapes.states)
        inputs = sum(
            (shape.width - 1) * ring[0, 0].nbytes
            for ring, shape in zip(cache.inputs, cache.shapes.convolutions, strict=True)
        )
        return states + inputs

    def take(self, place: int, cache_slot: int, position: int) -> None:
        """Store the states of a cache slot at a position that it can be truncated to."""
        for index, states in enumerate(self._states):
            states[place] = state_at(self._cache, index, cache_slot, position)
        for inputs, ring in zip(self._inputs, self._cache.inputs, strict=True):
            positions = torch.arange(position - inputs.shape[1], position, device=ring.device)
            # Inputs before the text are zero, which a ring that was cleared has at their places.
            inputs[place] = torch.where(
                (positions >= 0)[:, None], ring[cache_slot, positions % ring.shape[1]], 0
            )

    def restore(self, place: int, cache_slot: int, position: int) -> None:
        """Continue a cache slot from stored states."""
        for stored, states in zip(self._states, self._cache.states, strict=True):
            states[cache_slot] = stored[place]
        for inputs, ring in zip(self._inputs, self._cache.inputs, strict=True):
            positions = torch.arange(position - inputs.shape[1], position, device=ring.device)
            ring[cache_slot, positions % ring.shape[1]] = inputs[place]
        self._cache.restored(cache_slot, position)
