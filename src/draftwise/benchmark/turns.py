"""Turns of contenders, which every measurement shares: their order, ratios, and timed calls.

Contenders take turns in an order that changes every round, so that disturbances of the machine
affect all of them alike. Results are ratios of turns of the same round.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

Who = TypeVar("Who")


def in_turns(contenders: Sequence[Who], rounds: int) -> Iterator[tuple[int, Who]]:
    """Each contender once in every round, in an order that is shuffled anew.

    Yields:
        Index of the round, from 0, and the contender.
    """
    order, shuffle = list(contenders), random.Random(0)
    for number in range(rounds):
        shuffle.shuffle(order)
        for each in order:
            yield number, each


def ratios_of_turns(own: Sequence[float], base: Sequence[float]) -> list[float]:
    """Own over base for each round that both completed."""
    return [mine / theirs for mine, theirs in zip(own, base, strict=False)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; an empty mapping without values."""
    if not len(values):
        return {}
    low, median, high = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def median_ratio(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Median over turns of after / before, and its standard error; NaN with a single turn."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else math.nan
    return statistics.median(ratios), error


def time_pairs(
    shapes: Sequence[Who], rounds: int, seconds_of: Callable[[int, Who], float]
) -> dict[tuple[Who, int], list[float]]:
    """Seconds of each shape on both sides, 0 and 1, after an untimed round with cold caches.

    The sides of a shape directly follow one another, in an order that changes every round.
    """
    seconds: dict[tuple[Who, int], list[float]] = {(each, s): [] for each in shapes for s in (0, 1)}
    for number, shape in in_turns(shapes, rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            taken = seconds_of(side, shape)
            if number:
                seconds[shape, side].append(taken)
    return seconds


def time_calls(
    calls: Mapping[str, Callable[[], object]], rounds: int, num_untimed: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of each turn of each call, after ``num_untimed`` untimed rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number, name in in_turns(list(calls), num_untimed + rounds):
        start = time.perf_counter()
        calls[name]()
        if number >= num_untimed:
            times[name].append((time.perf_counter() - start) * 1e3)
    return times
