"""Warnings of commands about models that do not run on the fast path."""

import json

import pytest

from .. import forked

pytestmark = pytest.mark.slow

LINE = (
    "zoo:{name}' does not run on the fast path: there are no native kernels: "
    "DRAFTWISE_NATIVE is 0; expect passes to take about 4 times as long, and greedy texts may "
    "depend on the other requests of a batch"
)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("DRAFTWISE_NATIVE", "0")
    return forked.run


def expected(*names):
    return [f"{role}: '{LINE.format(name=name)}" for role, name in names]


def test_generate_warns_of_a_model_that_is_not_on_the_fast_path(run):
    done = run("generate", "Once", "--max-tokens", "4", "--device", "cpu", "--json")
    assert done.returncode == 0
    lines = expected(("target", "target"), ("draft", "draft"))
    assert [line for line in done.stderr.splitlines() if "fast path" in line] == [
        f"warning {line}" for line in lines
    ]
    assert json.loads(done.stdout)["warnings"] == lines


def test_benchmark_warns_once_per_model(run, tmp_path):
    workload = tmp_path / "prompts.jsonl"
    workload.write_text('{"prompt": "Once upon a time"}\n')
    done = run(
        *("benchmark", "--workload", str(workload), "--output", str(tmp_path / "report")),
        *("--target", "zoo:target", "--draft", "zoo:draft", "--policies", "fixed:2,fixed:3"),
        *("--batch-sizes", "1", "--rounds", "1", "--learning-turns", "0", "--max-tokens", "4"),
        *("--device", "cpu"),
    )
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "fast path" in line] == [
        f"warning {line}" for line in expected(("target", "target"), ("draft", "draft"))
    ]
