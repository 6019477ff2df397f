"""Interleaved timing of alternatives."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from draftwise.profiling.passes import PassShape


def take_turns(
    alternatives: Mapping[str, Callable[[], object]], repeats: int, num_untimed: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of each turn of each alternative, after ``num_untimed`` untimed turns."""
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(num_untimed + repeats):
        for name, run in alternatives.items():
            start = time.perf_counter()
            run()
            if turn >= num_untimed:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def pass_turns(
    timers: Mapping[int, Callable[[PassShape], float]], shapes: Sequence[PassShape], turns: int
) -> dict[tuple[PassShape, int], list[float]]:
    """Seconds of each turn by pass shape and timer, in a shuffled order.

    The timers of a shape directly follow one another. The first turn, with cold caches, is not
    counted.
    """
    seconds: dict[tuple[PassShape, int], list[float]] = defaultdict(list)
    order = random.Random(0)
    for turn in range(turns + 1):
        for shape in order.sample(shapes, len(shapes)):
            for key in order.sample(list(timers), len(timers)):
                taken = timers[key](shape)
                if turn:
                    seconds[shape, key].append(taken)
    return seconds


def ratio_of_turns(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Median over turns of after / before, and its standard error; NaN with a single turn."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else math.nan
    return statistics.median(ratios), error
