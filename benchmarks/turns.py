"""Timing several ways of doing something in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from draftwise.profiling.passes import PassShape


def take_turns(
    ways: Mapping[str, Callable[[], object]], repeats: int, num_untimed: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of each turn of each, after some that are not timed."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(num_untimed + repeats):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if turn >= num_untimed:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def pass_turns(
    ways: Mapping[int, Callable[[PassShape], float]], shapes: Sequence[PassShape], turns: int
) -> dict[tuple[PassShape, int], list[float]]:
    """Seconds of each turn of passes of each shape in each way, all in an order that changes.

    The ways of a shape follow one another at once. The first turn, which meets cold caches, is not
    counted.
    """
    seconds: dict[tuple[PassShape, int], list[float]] = defaultdict(list)
    order = random.Random(0)
    for turn in range(turns + 1):
        for shape in order.sample(shapes, len(shapes)):
            for way in order.sample(list(ways), len(ways)):
                taken = ways[way](shape)
                if turn:
                    seconds[shape, way].append(taken)
    return seconds


def ratio_of_turns(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Median ratio of the times of the same turns, and its standard error."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return statistics.median(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
