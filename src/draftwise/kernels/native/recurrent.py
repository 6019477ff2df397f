"""Layers with a recurrence, packed for the kernels of ``recurrent_layer.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from draftwise.kernels.native.structures import RecurrentLayer, RecurrentMemory, RecurrentRows
from draftwise.models.recurrence_spec import RecurrenceKind, RecurrenceSpec
from draftwise.models.recurrent.cache import KEPT_ROWS, MAX_ROWS, RecurrentCache

# Kinds in the order of ``RecurrentKind`` of ``recurrent_layer.h``.
_KINDS = (RecurrenceKind.DELTA_NET, RecurrenceKind.MAMBA2, RecurrenceKind.SHORT_CONVOLUTION)
_ACTIVATIONS = frozenset({None, "silu", "swish"})
# ``MOST_STATE_KEYS`` of ``recurrence.h``.
MOST_KEYS = 512


def why_no_recurrence(spec: RecurrenceSpec) -> str | None:
    """What the kernels lack for a recurrence, as a clause; ``None`` if nothing."""
    if spec.activation not in _ACTIVATIONS:
        return f"its convolutions have the activation {spec.activation}, and the kernels have silu"
    if spec.step is not None and spec.step.key_size > MOST_KEYS:
        return f"its states have {spec.step.key_size} keys, and the native kernels {MOST_KEYS}"
    return None


def recurrent_layer(spec: RecurrenceSpec, keep: Callable[[Tensor], int]) -> RecurrentLayer:
    """A recurrence as the kernels read it.

    Args:
        spec: the recurrence.
        keep: keeps a tensor as long as the result is used, and returns its address.
    """
    width, channels = spec.taps.shape
    layer = RecurrentLayer()
    layer.kind, layer.width, layer.channels = _KINDS.index(spec.kind), width, channels
    layer.taps = keep(spec.taps)
    layer.tap_bias = None if spec.tap_bias is None else keep(spec.tap_bias)
    step = spec.step
    if step is not None:
        layer.step_bias, layer.rate, layer.norm = map(keep, (step.bias, step.rate, step.norm))
        layer.skip = None if step.skip is None else keep(step.skip)
        layer.heads, layer.groups = step.heads, step.groups
        layer.keys, layer.values, layer.norm_size = step.key_size, step.value_size, step.norm_size
        layer.least_step, layer.most_step = step.limits
    return layer


def recurrent_memory(
    cache: RecurrentCache, recurrences: Sequence[RecurrenceSpec | None]
) -> tuple[ctypes.Array[RecurrentMemory], RecurrentRows]:
    """Where a cache has the states and convolution inputs of each layer.

    Args:
        cache: the states of a model's requests.
        recurrences: ``[layers]`` the recurrence of each layer; ``None`` for attention.
    """
    memory: Any = (RecurrentMemory * len(recurrences))()
    states, rings = iter(range(len(cache.states))), iter(cache.inputs)
    for to, spec in zip(memory, recurrences, strict=True):
        if spec is None:
            continue
        if spec.step is not None:
            index = next(states)
            parts = (cache.states, cache.decays, cache.keys, cache.updates)
            to.states, to.decays, to.keys, to.updates = (part[index].data_ptr() for part in parts)
            to.bases = cache.bases[index].ctypes.data
        ring = next(rings)
        to.ring, to.ring_size = ring.data_ptr(), ring.shape[1]
    return memory, RecurrentRows(cache.final_lengths.ctypes.data, MAX_ROWS, KEPT_ROWS)
