"""A run that records its results goes on where it stopped, and shards share it without a rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import progress
from .refusals import error_of

ROOT = Path(__file__).parent.parent

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests import progress

def pytest_addoption(parser):
    progress.add_options(parser)

def pytest_configure(config):
    record = config.getoption("record")
    if record is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Recorder(record))

def pytest_collection_modifyitems(config, items):
    progress.select(config, items)
"""
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range(6))
def test_something(number):
    if number == 2:
        pytest.skip("not here")
    assert number != 4 or pathlib.Path("mended").exists()
"""


@pytest.fixture
def run(tmp_path):
    """Run the tests above; the exit status and what was printed."""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (tmp_path / "test_something.py").write_text(TESTS)

    def run(*options):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    return run


def recorded(file):
    return [json.loads(line)["test"][-2] for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [(), ("-n", "2")])
def test_what_passed_is_not_run_again(run, tmp_path, parallel):
    results = tmp_path / "results"
    status, printed = run(f"--record={results}/0.jsonl", *parallel)
    assert status == 1
    assert "5 passed" not in printed
    assert sorted(recorded(results / "0.jsonl")) == list("012345")
    (tmp_path / "mended").touch()
    status, printed = run(f"--record={results}/1.jsonl", *parallel)
    assert status == 0
    assert sorted(recorded(results / "1.jsonl")) == ["2", "4"]
    # The table is of both runs.
    assert [line.split()[1:4] for line in printed.splitlines() if line.startswith("all ")][-1] == [
        "5",
        "0",
        "1",
    ]


@pytest.mark.slow
def test_shards_are_all_there_is(run, tmp_path):
    (tmp_path / "mended").touch()
    seen = []
    for number in (1, 2, 3, 4):
        file = tmp_path / "of" / str(number) / "results.jsonl"
        assert run(f"--record={file}", f"--shard={number}/4")[0] == 0
        seen += recorded(file)
    assert sorted(seen) == list("012345")


def test_what_is_no_shard():
    for text in ["0/3", "4/3", "3", "a/b", "1/", "-1/3"]:
        error_of(progress.shard, text, error=Exception, match="is not a shard")
        assert progress.shard("2/3") == (2, 3), text


def test_half_a_line_is_left_out(tmp_path):
    """As a run leaves it that was killed."""
    line = json.dumps({"test": "a.py::test_a", "outcome": "failed", "seconds": 1.0})
    later = line.replace("failed", "passed")
    (tmp_path / "0.jsonl").write_text(f"{line}\n{line.replace('test_a', 'test_b')}\n")
    (tmp_path / "1.jsonl").write_text(f"{later}\n{later[:20]}")
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [(each.test, each.outcome) for each in progress.read(files)] == [
        ("a.py::test_a", "passed"),
        ("a.py::test_b", "failed"),
    ]
