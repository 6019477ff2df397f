"""Load on a server: a number of clients, or requests that arrive at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


async def at_once(
    jobs: Sequence[Job], work: Callable[[Job], Awaitable[Result]], concurrency: int
) -> list[Result]:
    """Do jobs by a number of clients, each of which begins its next job when its last one ended.

    Returns:
        The results in the order of the jobs.
    """
    remaining = iter(enumerate(jobs))
    results: dict[int, Result] = {}

    async def client() -> None:
        for index, job in remaining:
            results[index] = await work(job)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return [results[index] for index in range(len(jobs))]


async def arriving(
    jobs: Sequence[Job], work: Callable[[Job], Awaitable[Result]], rate: float, seed: int
) -> list[Result]:
    """Begin jobs at the times of a Poisson process, whether or not earlier ones have ended.

    Args:
        jobs: the jobs.
        work: does a job.
        rate: mean number of jobs that begin in a second.
        seed: of the times, which are the same for the same seed.

    Returns:
        The results in the order of the jobs.
    """
    start = asyncio.get_running_loop().time()

    async def begin(job: Job, seconds: float) -> Result:
        await asyncio.sleep(start + seconds - asyncio.get_running_loop().time())
        return await work(job)

    pairs = zip(jobs, arrival_seconds(len(jobs), rate, seed), strict=True)
    return list(await asyncio.gather(*(begin(job, seconds) for job, seconds in pairs)))


def arrival_seconds(count: int, rate: float, seed: int) -> list[float]:
    """Times of a Poisson process, of which the first is 0.

    Args:
        count: number of times.
        rate: mean number of events in a second.
        seed: of the times.
    """
    draw = random.Random(seed)
    gaps = (draw.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))[:count]
