"""Threads pinned to separate cores, for models that run at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from draftwise.openmp import usable_cores

Result = TypeVar("Result")


class PinnedThread:
    """A thread that computes on its own cores.

    PyTorch and the native kernels create a team of worker threads for every computing thread. The
    team runs on the cores that the thread is pinned to.
    """

    def __init__(self, name: str, cores: Sequence[int]) -> None:
        """Start the thread.

        Args:
            name: name of the thread.
            cores: indices of the cores it may use, at least one.
        """
        count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, name, _bind, (tuple(cores),))
        self._pool.submit(torch.get_num_threads).result()
        # The pinned thread changed the default of threads that start later, so restore it.
        torch.set_num_threads(count)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run a function in the thread, after all functions submitted before."""
        return self._pool.submit(work)

    def close(self) -> None:
        """End the thread after all submitted functions."""
        self._pool.shutdown()


def shares() -> tuple[list[int], list[int]] | None:
    """Cores of the target, and one core for the small models.

    The small models get a core that the target leaves idle, or else one of the target's. ``None``
    if there is no core to spare.
    """
    cores = usable_cores()
    count = min(torch.get_num_threads(), len(cores) - 1)
    return (cores[:count], cores[count : count + 1]) if count > 0 else None


def _bind(cores: tuple[int, ...]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # 0 is the calling thread
    torch.set_num_threads(len(cores))
