"""The memory limit of the key-value caches, and the context that fits it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from draftwise.models.packed_model import PackedModel
from draftwise.values import number

# Fraction of the available memory that the caches may use on a CPU.
_CACHE_SHARE = 0.5
# A context that is shortened to fit is a multiple of this.
_CONTEXT_STEP = 64


def cache_bytes(cache_gib: float | None, device: torch.device) -> int | None:
    """The maximum number of bytes that all caches together may reserve.

    Args:
        cache_gib: the user's limit in GiB; ``None`` for half of the available memory.
        device: device of the caches.

    Returns:
        The limit; ``None`` if only the device's memory is the limit.

    Raises:
        InvalidParameterError: the user's limit is not a positive number.
    """
    if cache_gib is not None:
        return int(number("cache_gib", cache_gib, 0.0, math.inf, low_open=True) * 2**30)
    if device.type == "cuda":
        return None  # slots are allocated in full, so a cache that does not fit fails at load
    free = _available_bytes()
    return None if free is None else int(_CACHE_SHARE * free)


def fitting_context(model: PackedModel, context: int, limit: int | None) -> int:
    """The longest context of which one request fits the memory of the key-value caches.

    Args:
        model: the target.
        context: its context length.
        limit: bytes for all caches; ``None`` for no limit.

    Returns:
        At most ``context`` and at least 1.
    """
    per_token = sum(layer.token_bytes(model.dtype) for layer in model.layers if layer.span is None)
    if limit is None or not per_token:
        return context
    fitting = limit // per_token
    return context if fitting >= context else max(1, fitting // _CONTEXT_STEP * _CONTEXT_STEP)


def _available_bytes() -> int | None:
    """Bytes of memory available without swapping, including the system's file cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
