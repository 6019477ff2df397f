"""The states of the requests in the recurrent layers of a model.

A recurrent state cannot be cut back to an earlier position. So the state in memory is that of a
position before which no token is rejected any more, its *base*, and of the tokens since, *rows* are
kept that change it in the same way as the tokens did. A pass first moves the base to the newest
position that is final, then continues with a copy of the state. See ``recurrence.h``.

Convolutions keep the newest inputs in a ring, as layers that attend to a window keep their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.models.memory import cache_zeros
from draftwise.models.recurrent.shapes import RecurrentShapes

# Rows of tokens that may be rejected: the most that are drafted, and the token before them.
MAX_ROWS = 65
# Rows that are kept of a pass with more tokens, which are a prompt's. They contain the end of a
# stored block, so that the state there can be stored.
KEPT_ROWS = 16
# The base of a state that an exception left half changed. No position is as large.
_LOST = 2**62


class RecurrentCache:
    """States, rows and convolution inputs of ``num_slots`` requests.

    Attributes:
        shapes: what the model keeps of a request.
        states: ``[slots, heads, keys, values]`` float32 of each state.
        decays: ``[slots, MAX_ROWS, heads, decay_size]`` float32 of each state.
        keys: ``[slots, MAX_ROWS, heads, keys]`` float32 of each state.
        updates: ``[slots, MAX_ROWS, heads, values]`` float32 of each state.
        bases: ``[states, slots]`` int64 position of each state.
        final_lengths: ``[slots]`` int64; no token before this position will be rejected.
        inputs: ``[slots, size, channels]`` ring of each convolution. The input at position p is at
            p % size.
        bytes_per_slot: memory of a request of whose tokens few may be rejected.
    """

    def __init__(
        self, shapes: RecurrentShapes, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate memory. On a CPU, it becomes resident when it is written.

        Args:
            shapes: what the model keeps of a request.
            num_slots: maximum number of requests.
            dtype: type of convolution inputs.
            device: device of the model.
        """
        self.shapes = shapes

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return cache_zeros(shape, dtype, device)

        self.states = [zeros(num_slots, s.heads, s.keys, s.values) for s in shapes.states]
        rows = num_slots, MAX_ROWS
        self.decays = [zeros(*rows, s.heads, s.decay_size) for s in shapes.states]
        self.keys = [zeros(*rows, s.heads, s.keys) for s in shapes.states]
        self.updates = [zeros(*rows, s.heads, s.values) for s in shapes.states]
        self.bases = np.zeros((len(shapes.states), num_slots), dtype=np.int64)
        self.inputs = [
            zeros(num_slots, each.width - 1 + MAX_ROWS, each.channels, dtype=dtype)
            for each in shapes.convolutions
        ]
        self._taps: dict[int, Tensor] = {}
        self.final_lengths = np.zeros(num_slots, dtype=np.int64)
        self._written = [0] * num_slots
        self.bytes_per_slot = sum(
            each.num_bytes + KEPT_ROWS * each.row_bytes for each in shapes.states
        ) + sum(ring[0].nbytes for ring in self.inputs)

    def taps(self, index: int, weight: Tensor) -> Tensor:
        """The weight of a convolution as ``[width, channels]`` float32, kept for later passes."""
        if index not in self._taps:
            self._taps[index] = weight.float().T.contiguous()
        return self._taps[index]

    def begin_pass(self, segments: Iterable[tuple[int, int, int]]) -> None:
        """Record what a pass is about to write, as an exception may come before its end.

        Args:
            segments: cache slot, start and number of tokens of each request.
        """
        for slot, start, count in segments:
            self._written[slot] = max(self._written[slot], start + count)

    def check(self, segments: Sequence[tuple[int, int, int]], index: int | None = None) -> None:
        """Check that states can continue with the tokens of a pass.

        Args:
            segments: cache slot, start and number of tokens of each request.
            index: which state; ``None`` for all of them.

        Raises:
            ValueError: the rows do not reach from a base to a segment's start.
        """
        slots, starts = np.array([segment[:2] for segment in segments], np.int64).T
        bases = self.bases[:, slots] if index is None else self.bases[[index]][:, slots]
        wrong = (starts < bases) | (starts > bases + MAX_ROWS)
        if wrong.any():
            state, at = np.argwhere(wrong)[0]
            base, slot = bases[state, at], slots[at]
            raise ValueError(f"the state of cache slot {slot} is at {base}, not at {starts[at]}")

    def plan(self, index: int, segments: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
        """To which base each request's state advances in a pass.

        ``new_base`` of ``recurrent_layer.h`` has the same rule.

        Args:
            index: which state.
            segments: cache slot, start and number of tokens of each request.

        Returns:
            ``[segments, 4]`` as in ``RecurrenceSegment``: slot, start, count, new base.

        Raises:
            ValueError: the rows do not reach from the base to a segment's start.
        """
        self.check(segments, index)
        planned = np.empty((len(segments), 4), np.int64)
        for at, (slot, start, count) in enumerate(segments):
            base, end = int(self.bases[index, slot]), start + count
            new = min(max(base, int(self.final_lengths[slot])), start)
            if end - new > MAX_ROWS:
                new = end - KEPT_ROWS
            planned[at] = slot, start, count, new
        return planned

    def lose(self, index: int, slots: Sequence[int]) -> None:
        """Mark states while they are changed in several steps."""
        self.bases[index, slots] = _LOST

    def position_before(self, cache_slot: int, length: int, block_size: int) -> int | None:
        """The last end of a block, at most at ``length``, whose states can be computed."""
        position = length // block_size * block_size
        return position if position and self.can_truncate(cache_slot, position) else None

    def restored(self, cache_slot: int, position: int) -> None:
        """States and inputs of a position were copied to a cache slot."""
        self.bases[:, cache_slot] = position
        self.final_lengths[cache_slot] = self._written[cache_slot] = position

    def settle(self, cache_slot: int, length: int) -> None:
        """No token before position ``length`` will be rejected."""
        self.final_lengths[cache_slot] = length

    def can_truncate(self, cache_slot: int, length: int) -> bool:
        """Whether the states after the first ``length`` tokens can be computed."""
        has_inputs = self._written[cache_slot] - length <= MAX_ROWS
        return has_inputs and bool((self.bases[:, cache_slot] <= length).all())

    def clear(self, cache_slot: int) -> None:
        """Begin with zero states."""
        if self._written[cache_slot]:
            for memory in (*self.states, *self.inputs):
                memory[cache_slot].zero_()
        self.bases[:, cache_slot] = 0
        self.final_lengths[cache_slot] = self._written[cache_slot] = 0
