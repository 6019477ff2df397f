"""Which tests `make check` and `make test` leave out, beside those that are marked one by one.

A test marked ``covering("policy", "method")`` is run by `make test` with as few cases as it takes
for each policy and each method to occur. Its other cases are marked ``exhaustive``. Cases that need
CUDA are chosen apart, as they are skipped elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import pytest

# A test that uses one of these is slow.
SLOW_FIXTURES = {"browser", "server"}


def mark(items: list[pytest.Item]) -> None:
    """Mark tests as slow by their fixtures, and cases of covering tests as exhaustive."""
    for item in items:
        if not SLOW_FIXTURES.isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    _mark_what_is_exhaustive(items)


def _mark_what_is_exhaustive(items: list[pytest.Item]) -> None:
    functions = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker is not None:
            name = item.nodeid.partition("[")[0]
            functions[name, marker.args, _needs_more(item)].append(item)
    for (_, names, _), cases in functions.items():
        chosen = cover([[_value(case, name) for name in names] for case in cases])
        for index, case in enumerate(cases):
            if index not in chosen:
                case.add_marker(pytest.mark.exhaustive)


def cover(cases: list[list[str]]) -> set[int]:
    """Indices of a few cases in which every value of every parameter occurs.

    Takes the case with the most new values again and again. Among equals it takes the one whose
    values were taken least, then the first.

    Args:
        cases: for each case, the value of each parameter.
    """
    rows = [list(enumerate(values)) for values in cases]
    missing = {value for row in rows for value in row}
    taken: Counter[tuple[int, str]] = Counter()
    chosen = set()
    while missing:

        def gain(index: int) -> tuple[int, int]:
            row = rows[index]
            return len(missing.intersection(row)), -sum(taken[value] for value in row)

        best = max(range(len(rows)), key=gain)
        chosen.add(best)
        missing.difference_update(rows[best])
        taken.update(rows[best])
    return chosen


def _value(item: pytest.Item, name: str) -> str:
    """A parameter of a test, or an attribute of one: ``policy``, ``case.policy``."""
    parameter, _, attribute = name.partition(".")
    value = item.callspec.params[parameter]
    return repr(attrgetter(attribute)(value) if attribute else value)


def _needs_more(item: pytest.Item) -> bool:
    """Whether a case is run only where there is what it needs, such as CUDA."""
    return any(mark.name == "skipif" for mark in item.callspec.marks)


def exhaustive_unless(chosen: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which `make test` runs the chosen ones only."""
    return [
        value if chosen(value) else pytest.param(value, marks=pytest.mark.exhaustive)
        for value in values
    ]
