"""How much the models slow each other down when they run at the same time."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from draftwise.engine.lanes import Lane, shares
from draftwise.errors import InvalidParameterError
from draftwise.profiling.passes import PassShape, PassTimer, Stage

_NUM_ROUNDS = 7


def measure_interference(
    timer: PassTimer, batch_sizes: Sequence[int], num_tokens_per_request: int, context: int
) -> dict[Stage, float]:
    """Time target passes while the draft drafts without pause, against each alone.

    Alone a model has all cores. Beside each other target and draft run as an engine runs them that
    overlaps them: each in a lane with its share of the cores.

    Args:
        timer: with a draft.
        batch_sizes: to average over.
        num_tokens_per_request: the target's tokens for each request.
        context: of each request.

    Returns:
        For target and draft, how many times as long a pass takes beside the other: the median
        over rounds and batch sizes.

    Raises:
        InvalidParameterError: there is but one core.
    """
    cores = shares()
    if cores is None:
        raise InvalidParameterError("interference", "needs two cores to run two models on")
    large, small = (Lane(name, each) for name, each in zip(("target", "draft"), cores, strict=True))
    ratios: dict[Stage, list[float]] = {Stage.TARGET: [], Stage.DRAFT: []}
    try:
        for num_requests in batch_sizes:
            target = PassShape(num_requests, num_requests * num_tokens_per_request, context)
            draft = PassShape(num_requests, num_requests, context)
            _beside(timer, large, target, small, draft)
            for _ in range(_NUM_ROUNDS):
                alone = timer(Stage.TARGET, target)
                drafting_alone = timer(Stage.DRAFT, draft)
                beside, drafting_beside = _beside(timer, large, target, small, draft)
                ratios[Stage.TARGET].append(beside / alone)
                ratios[Stage.DRAFT].append(drafting_beside / drafting_alone)
    finally:
        large.close()
        small.close()
    return {stage: statistics.median(values) for stage, values in ratios.items()}


def _beside(
    timer: PassTimer, large: Lane, target: PassShape, small: Lane, draft: PassShape
) -> tuple[float, float]:
    """Seconds of a pass of target and draft, each in its lane."""
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
