"""Options that record what passed, go on where a run was stopped, and share it among machines."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NUM_SLOWEST = 10


class Result(NamedTuple):
    """How a test ended, and how long it took with its set-up and tear-down."""

    test: str
    outcome: str
    seconds: float


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this module."""
    group = parser.getgroup("progress", "recording, resuming and sharing a run")
    group.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the result of each test to FILE.jsonl, leave out tests that passed according "
        "to the other .jsonl files in its folder, and end with a table of all of them",
    )
    group.addoption(
        "--shard", type=shard, metavar="K/N", help="run every Nth test, starting with the Kth"
    )


def shard(text: str) -> tuple[int, int]:
    """``(2, 8)`` for ``2/8``."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ArgumentTypeError(f"{text!r} is not a shard; write 2/8 for the second of eight")
    return int(number), int(count)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other shards and tests that passed before."""
    number, count = config.getoption("shard") or (1, 1)
    own = items[number - 1 :: count]
    record = config.getoption("record")
    # The file of this run grows while processes that join late collect their tests.
    earlier = [] if record is None else [f for f in _records(record.parent) if f != record]
    done = {result.test for result in read(earlier) if result.outcome == "passed"}
    remaining = [item for item in own if item.nodeid not in done]
    kept = set(remaining)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = remaining


def _records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def read(files: Iterable[Path]) -> Iterator[Result]:
    """The last result of each test."""
    last = {}
    for file in files:
        for line in file.read_text().splitlines(keepends=True):
            # A run that was killed may have left half a line.
            if line.endswith("}\n"):
                result = Result(**json.loads(line))
                last[result.test] = result
    yield from last.values()


class Recorder:
    """Writes the result of each test to a file as soon as the test ends."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = path.parent
        self._file = path.open("a")
        self._reports: dict[str, list[pytest.TestReport]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down."""
        self._reports[report.nodeid].append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Called at the end of a test."""
        reports = self._reports.pop(nodeid)
        outcomes = {report.outcome for report in reports}
        outcome = next(each for each in ("failed", "skipped", "passed") if each in outcomes)
        seconds = sum(report.duration for report in reports)
        result = Result(nodeid, outcome, round(seconds, 3))
        self._file.write(json.dumps(result._asdict()) + "\n")
        self._file.flush()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Called at the end of the run."""
        terminalreporter.section("all runs together")
        for line in table(list(read(_records(self._folder)))):
            terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        """Called last."""
        self._file.close()


def table(results: list[Result]) -> Iterator[str]:
    """Numbers and times of each folder, and the slowest tests."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        path, _, _ = result.test.partition("::")
        for name in (str(Path(path).parent), "all"):
            folders[name][result.outcome] += 1
            folders[name]["seconds"] += result.seconds
    outcomes = ("passed", "failed", "skipped")
    yield f"{'folder':28}" + "".join(f"{each:>9}" for each in outcomes) + f"{'seconds':>9}"
    for name, counts in sorted(folders.items(), key=lambda each: (each[0] == "all", each[0])):
        numbers = "".join(f"{counts[each]:9}" for each in outcomes)
        yield f"{name:28}{numbers}{counts['seconds']:9.0f}"
    yield "slowest:"
    for result in sorted(results, key=lambda each: -each.seconds)[:NUM_SLOWEST]:
        yield f"{result.seconds:8.1f} s  {result.test}"
