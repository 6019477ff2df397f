"""Measure the slowdown of target and draft when they run at the same time."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from draftwise.engine.parallel.pinned_threads import PinnedThread, shares
from draftwise.errors import InvalidParameterError
from draftwise.profiling.passes import PassShape, PassTimer, Stage

_NUM_ROUNDS = 7


def cores_of_both() -> tuple[list[int], list[int]]:
    """The cores of the target and of the draft in a measurement of their slowdown.

    Raises:
        InvalidParameterError: the process has only one core.
    """
    cores = shares()
    if cores is None:
        raise InvalidParameterError("interference", "requires at least two cores")
    return cores


def measure_interference(
    timer: PassTimer, batch_sizes: Sequence[int], num_tokens_per_request: int, context: int
) -> dict[Stage, float]:
    """Time passes of target and draft running concurrently, relative to each running alone.

    Alone, a model uses all cores. Concurrently, each model runs on a pinned thread with its share
    of the cores, as in an engine with overlapped drafting. The draft runs without pause.

    Args:
        timer: pass timer with a draft.
        batch_sizes: batch sizes to measure.
        num_tokens_per_request: the target's tokens for each request.
        context: context tokens of each request.

    Returns:
        For target and draft, the factor by which a pass is slower when the other runs: the median
        over rounds and batch sizes.

    Raises:
        InvalidParameterError: the process has only one core.
    """
    large, small = (
        PinnedThread(name, each)
        for name, each in zip(("target", "draft"), cores_of_both(), strict=True)
    )
    ratios: dict[Stage, list[float]] = {Stage.TARGET: [], Stage.DRAFT: []}
    try:
        for num_requests in batch_sizes:
            target = PassShape(num_requests, num_requests * num_tokens_per_request, context)
            draft = PassShape(num_requests, num_requests, context)
            _concurrently(timer, large, target, small, draft)
            for _ in range(_NUM_ROUNDS):
                alone = timer(Stage.TARGET, target)
                drafting_alone = timer(Stage.DRAFT, draft)
                both, drafting_both = _concurrently(timer, large, target, small, draft)
                ratios[Stage.TARGET].append(both / alone)
                ratios[Stage.DRAFT].append(drafting_both / drafting_alone)
    finally:
        large.close()
        small.close()
    return {stage: statistics.median(values) for stage, values in ratios.items()}


def _concurrently(
    timer: PassTimer, large: PinnedThread, target: PassShape, small: PinnedThread, draft: PassShape
) -> tuple[float, float]:
    """Seconds of a pass of target and draft, each on its pinned thread."""
    stop = threading.Event()

    def drafting() -> list[float]:
        times = [timer(Stage.DRAFT, draft)]
        while not stop.is_set():
            times.append(timer(Stage.DRAFT, draft))
        return times

    times: Future[list[float]] = small.submit(drafting)
    try:
        seconds = large.submit(lambda: timer(Stage.TARGET, target)).result()
    finally:
        stop.set()
    return seconds, statistics.median(times.result())
