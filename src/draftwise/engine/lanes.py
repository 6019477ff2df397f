"""Threads with a share of the machine's cores each, for models that run at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Lane:
    """A thread that computes on cores of its own.

    PyTorch and our kernels give every thread that computes a team of threads; the team is made on
    the cores that its thread is bound to.
    """

    def __init__(self, name: str, cores: Sequence[int]) -> None:
        """Start it.

        Args:
            name: of the thread.
            cores: numbers of the cores it may use, at least one.
        """
        count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, name, _bind, (tuple(cores),))
        self._pool.submit(torch.get_num_threads).result()
        # What one thread sets is the default of all that begin later.
        torch.set_num_threads(count)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do something in it, after what was submitted before."""
        return self._pool.submit(work)

    def close(self) -> None:
        """End it when all is done."""
        self._pool.shutdown()


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shares() -> tuple[list[int], list[int]] | None:
    """Cores of the target and of the small models, which get one.

    It is one that the target leaves idle, or else one of the target's; ``None`` where there is none
    to spare.
    """
    cores = usable_cores()
    count = min(torch.get_num_threads(), len(cores) - 1)
    return (cores[:count], cores[count : count + 1]) if count > 0 else None


def _bind(cores: tuple[int, ...]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # of this thread
    torch.set_num_threads(len(cores))
