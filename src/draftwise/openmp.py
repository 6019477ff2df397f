"""Defaults of the OpenMP runtime, which PyTorch and the native kernels share.

The runtime reads its environment variables when PyTorch is imported. Variables that are set already
stay as they are. An engine that is given a number of threads uses that number.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

# Iterations that a thread waits for work before it sleeps, about 0.1 ms. The default is 300,000, so
# that idle threads take cores away from threads that compute.
_SPINS = "1000"


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let idle threads sleep, and use no more threads than the CPU limit of a container allows."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    limit = cpu_limit()
    if limit is not None and limit < len(usable_cores()):
        environment.setdefault("OMP_NUM_THREADS", str(max(1, int(limit))))


def usable_cores() -> list[int]:
    """Indices of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_limit(root: Path = Path("/")) -> float | None:
    """The cores that the control groups of this process allow; ``None`` without a limit.

    Source: the files ``cpu.max`` of version 2, and ``cpu.cfs_quota_us`` of version 1, of
    https://docs.kernel.org/admin-guide/cgroup-v2.html and its predecessor.

    Args:
        root: the root folder.
    """
    limits = [
        limit
        for folder in _control_groups(root)
        for limit in (_limit_in(folder),)
        if limit is not None
    ]
    return min(limits, default=None)


def _control_groups(root: Path) -> list[Path]:
    """The folders of the groups that limit this process: its own and those around it."""
    folders: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        # Within a container, the group's own folder is mounted as the top.
        folder = top / path.strip("/")
        folders.extend([folder, *(each for each in folder.parents if each.is_relative_to(top))])
    return folders


def _limit_in(folder: Path) -> float | None:
    words = [word for line in _lines(folder / "cpu.max") for word in line.split()]
    if not words:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [line for name in names for line in _lines(folder / name)]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no limit at all
        return None
    return quota / period if quota > 0 and period > 0 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
