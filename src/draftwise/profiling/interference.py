"""How much the models slow each other down when they run at the same time."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence

from draftwise.profiling.passes import PassShape, PassTimer, Stage

_NUM_ROUNDS = 7


def measure_interference(
    timer: PassTimer, batch_sizes: Sequence[int], num_tokens_per_request: int, context: int
) -> dict[Stage, float]:
    """Time target passes while a thread drafts without pause, against each alone.

    The engine runs its models one after the other; this says what overlapping them would cost.
    Both share the machine's cores (PyTorch gives every thread a team of its own), so on a CPU with
    few of them the factors are large.

    Args:
        timer: with a draft.
        batch_sizes: to average over.
        num_tokens_per_request: the target's tokens for each request.
        context: of each request.

    Returns:
        For target and draft, how many times as long a pass takes beside the other: the median
        over rounds and batch sizes.
    """
    ratios: dict[Stage, list[float]] = {Stage.TARGET: [], Stage.DRAFT: []}
    for num_requests in batch_sizes:
        target = PassShape(num_requests, num_requests * num_tokens_per_request, context)
        draft = PassShape(num_requests, num_requests, context)
        timer(Stage.TARGET, target)
        timer(Stage.DRAFT, draft)
        for _ in range(_NUM_ROUNDS):
            alone = timer(Stage.TARGET, target)
            drafting_alone = timer(Stage.DRAFT, draft)
            with _Drafting(timer, draft) as drafting:
                beside = timer(Stage.TARGET, target)
            ratios[Stage.TARGET].append(beside / alone)
            ratios[Stage.DRAFT].append(statistics.median(drafting.times) / drafting_alone)
    return {stage: statistics.median(values) for stage, values in ratios.items()}


class _Drafting:
    """Drafts in a thread as long as the context lasts, at least once.

    Attributes:
        times: seconds of the passes.
    """

    def __init__(self, timer: PassTimer, shape: PassShape) -> None:
        self.times: list[float] = []
        self._timer, self._shape = timer, shape
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Drafting:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() or not self.times:
            self.times.append(self._timer(Stage.DRAFT, self._shape))
