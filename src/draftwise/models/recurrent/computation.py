"""The tokens of a pass in recurrent layers and convolutions, request by request."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.kernels.native.library import library_for
from draftwise.kernels.native.recurrent import MOST_KEYS
from draftwise.kernels.native.structures import ConvolutionCall, RecurrenceCall
from draftwise.models.recurrent.cache import MAX_ROWS, RecurrentCache
from draftwise.models.recurrent.shapes import RecurrentShapes, StateShape
from draftwise.models.segment import Segment


@dataclass
class RecurrentPass:
    """The recurrent layers of one pass, which are computed in a fixed order.

    Attributes:
        cache: the states of the requests.
        segments: the new tokens of each request.
    """

    cache: RecurrentCache
    segments: Sequence[Segment]
    _num_states: int = field(default=0, init=False)
    _num_convolutions: int = field(default=0, init=False)

    def recur(
        self,
        decay: Tensor,
        key: Tensor,
        value: Tensor,
        query: Tensor,
        beta: Tensor | None = None,
    ) -> Tensor:
        """Compute the next recurrence of the pass.

        For each token, ``state = decay * state``, then ``state = state + outer(key, update)``,
        then ``out = query @ state``. The update is the value, or with the delta rule
        ``beta * (value - key @ state)``.

        Args:
            decay: ``[tokens, heads, decay_size]`` factors, at most 1.
            key: ``[tokens, heads, keys]``.
            value: ``[tokens, heads, values]``.
            query: ``[tokens, heads, keys]``.
            beta: ``[tokens, heads]`` for the delta rule; ``None`` without it.

        Returns:
            ``[tokens, heads, values]`` float32.
        """
        index, self._num_states = self._num_states, self._num_states + 1
        decay, key, query = (each.float().contiguous() for each in (decay, key, query))
        # The kernel overwrites the values with the updates.
        value = value.float().clone(memory_format=torch.contiguous_format)
        beta = None if beta is None else beta.float().contiguous()
        planned = self.cache.plan(index, self.segments)
        compute = _recur_natively if _has_kernel(value, key.shape[2]) else _recur
        return compute(self.cache, index, planned, decay, key, query, value, beta)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the next causal convolution of the pass, each channel on its own.

        Args:
            inputs: ``[tokens, channels]``.
            weight: ``[channels, width]``, the newest input's last.
            bias: ``[channels]`` or ``None``.

        Returns:
            ``[tokens, channels]`` float32.
        """
        index, self._num_convolutions = self._num_convolutions, self._num_convolutions + 1
        ring = self.cache.inputs[index]
        library, is_bfloat16 = library_for(inputs.device), ring.dtype == torch.bfloat16
        has_type = inputs.dtype == ring.dtype and ring.dtype in (torch.float32, torch.bfloat16)
        if library is None or not has_type:
            return self._convolve(ring, inputs, weight, bias)
        inputs, out = inputs.contiguous(), torch.empty(inputs.shape)
        taps = self.cache.taps(index, weight)
        bias = None if bias is None else bias.float().contiguous()
        segments = np.array([(*each, 0) for each in self.segments], np.int64)
        call = ConvolutionCall(
            *(each.data_ptr() for each in (ring, inputs, taps)),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            segments.ctypes.data,
            *(len(segments), len(taps), ring.shape[1], inputs.shape[1], is_bfloat16),
        )
        threads = library.threads()
        library.convolve(ctypes.byref(call), ctypes.byref(threads))
        return out

    def _convolve(
        self, ring: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The same in PyTorch's operations."""
        size, width = ring.shape[1], weight.shape[1]
        parts, first = [], 0
        for slot, start, count in self.segments:
            before = torch.arange(start - width + 1, start, device=ring.device)
            history = torch.where((before >= 0)[:, None], ring[slot, before % size], 0)
            parts += [history.to(inputs.dtype), inputs[first : first + count]]
            first += count
        rows = torch.cat(parts)
        at, place = [], 0
        for _, _, count in self.segments:
            at.append(torch.arange(place, place + count, device=ring.device))
            place += width - 1 + count
        places, first = torch.cat(at), 0
        # Written out, so that the sums have the same order for any number of tokens.
        result = torch.zeros(inputs.shape, device=inputs.device)
        for tap in range(width):
            result += rows[places + tap].float() * weight[:, tap].float()
        if bias is not None:
            result += bias.float()
        for slot, start, count in self.segments:
            kept = min(count, size)
            positions = torch.arange(start + count - kept, start + count, device=ring.device)
            ring[slot, positions % size] = inputs[first + count - kept : first + count].to(
                ring.dtype
            )
            first += count
        return result


def state_at(cache: RecurrentCache, index: int, slot: int, position: int) -> Tensor:
    """The state ``[heads, keys, values]`` of a request at a position, from its base on."""
    shape, one = cache.shapes.states[index], RecurrentCache.__new__(RecurrentCache)
    one.shapes = RecurrentShapes((shape,))
    one.states = [cache.states[index][slot : slot + 1].clone()]
    one.decays, one.keys, one.updates = (
        [each[index][slot : slot + 1]] for each in (cache.decays, cache.keys, cache.updates)
    )
    one.bases = cache.bases[index : index + 1, slot : slot + 1].copy()
    planned = np.array([0, position, 0, position], np.int64).reshape(1, 4)
    device = one.states[0].device
    none = [torch.empty(0, shape.heads, size, device=device) for size in _sizes(shape)]
    decay, key, value = none
    compute = _recur_natively if _has_kernel(value, shape.keys) else _recur
    compute(one, 0, planned, decay, key, key, value, None)
    return one.states[0][0]


def _sizes(shape: StateShape) -> tuple[int, int, int]:
    return shape.decay_size, shape.keys, shape.values


def _has_kernel(value: Tensor, num_keys: int) -> bool:
    return num_keys <= MOST_KEYS and library_for(value.device) is not None


def _recur_natively(
    cache: RecurrentCache,
    index: int,
    planned: NDArray[np.int64],
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    value: Tensor,
    beta: Tensor | None,
) -> Tensor:
    library, shape = library_for(value.device), cache.shapes.states[index]
    assert library is not None
    out = torch.empty_like(value)
    rows = (cache.states, cache.decays, cache.keys, cache.updates)
    call = RecurrenceCall(
        *(each[index].data_ptr() for each in rows),
        cache.bases[index].ctypes.data,
        planned.ctypes.data,
        *(each.data_ptr() for each in (decay, key, query, value)),
        None if beta is None else beta.data_ptr(),
        out.data_ptr(),
        *(len(planned), shape.heads, shape.keys, shape.values, shape.decay_size, MAX_ROWS),
    )
    threads = library.threads()
    library.recur(ctypes.byref(call), ctypes.byref(threads))
    return out


def _recur(
    cache: RecurrentCache,
    index: int,
    planned: NDArray[np.int64],
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    value: Tensor,
    beta: Tensor | None,
) -> Tensor:
    """The same in PyTorch's operations."""
    shape, out, first = cache.shapes.states[index], torch.empty_like(value), 0
    states, bases = cache.states[index], cache.bases[index]
    kept = cache.decays[index], cache.keys[index], cache.updates[index]
    decay_shape = _decay_shape(shape.decay_size, shape.keys, shape.values)
    for slot, start, count, new in planned.tolist():
        base, state = int(bases[slot]), states[slot].clone()
        final = state
        for position in range(base, start + count):
            if position == new:
                final = state.clone()
            row = position - base if position < start else first + position - start
            source = [each[slot, row] for each in kept] if position < start else None
            decays, keys, update = source or (decay[row], key[row], value[row])
            state = state * decays.view(-1, *decay_shape)
            if source is None and beta is not None:
                expected = (state * keys.unsqueeze(2)).sum(1)
                update = value[row] = beta[row].unsqueeze(1) * (update - expected)
            state = state + keys.unsqueeze(2) * update.unsqueeze(1)
            if source is None:
                out[row] = (state * query[row].unsqueeze(2)).sum(1)
        if new == start + count:
            final = state
        new_rows = [
            torch.cat([each[slot, new - base : max(0, start - base)], now[first : first + count]])
            for each, now in zip(kept, (decay, key, value), strict=True)
        ]
        cache.lose(index, [slot])
        states[slot] = final
        for each, rows in zip(kept, new_rows, strict=True):
            each[slot, : start + count - new] = rows[-(start + count - new) or len(rows) :]
        bases[slot] = new
        first += count
    return out


def _decay_shape(size: int, keys: int, values: int) -> tuple[int, int]:
    return (1, 1) if size == 1 else (keys, 1) if size == keys else (keys, values)
