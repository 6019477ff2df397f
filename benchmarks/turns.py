"""Timing several ways of doing something in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


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
