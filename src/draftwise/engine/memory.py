"""How much memory keys and values may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

# Share of the free memory that keys and values may take on a CPU.
_CACHE_SHARE = 0.5


def cache_bytes(cache_gib: float | None, device: torch.device) -> int | None:
    """Bytes that all caches together may reserve.

    Args:
        cache_gib: as the user said; ``None`` for half of what is available.
        device: where the caches are.

    Returns:
        ``None`` where there is no limit but the device's.
    """
    if cache_gib is not None:
        return int(cache_gib * 2**30)
    if device.type == "cuda":
        return None  # rows are allocated whole; what does not fit fails at load
    free = _available_bytes()
    return None if free is None else int(_CACHE_SHARE * free)


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, files that the system caches included."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
