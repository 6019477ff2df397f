"""Warnings of commands about models that do not run on the fast path."""

import json
import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from draftwise.cli import main; main()"]
LINE = (
    "zoo:{name}' does not run on the fast path: there are no native kernels: "
    "DRAFTWISE_NATIVE is 0; expect passes to take about 4 times as long"
)


def run(*arguments):
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "DRAFTWISE_NATIVE": "0"},
    )


def expected(*names):
    return [f"{role}: '{LINE.format(name=name)}" for role, name in names]


def test_generate_warns_of_a_model_that_is_not_on_the_fast_path():
    done = run("generate", "Once", "--max-tokens", "4", "--device", "cpu", "--json")
    lines = expected(("target", "target"), ("draft", "draft"))
    assert [line for line in done.stderr.splitlines() if "fast path" in line] == [
        f"warning {line}" for line in lines
    ]
    assert json.loads(done.stdout)["warnings"] == lines


@pytest.mark.slow
def test_benchmark_warns_once_per_model(tmp_path):
    workload = tmp_path / "prompts.jsonl"
    workload.write_text('{"prompt": "Once upon a time"}\n')
    done = run(
        *("benchmark", "--workload", str(workload), "--output", str(tmp_path / "report")),
        *("--target", "zoo:target", "--draft", "zoo:draft", "--policies", "fixed:2,fixed:3"),
        *("--batch-sizes", "1", "--rounds", "1", "--learning-turns", "0", "--max-tokens", "4"),
        *("--device", "cpu"),
    )
    assert [line for line in done.stderr.splitlines() if "fast path" in line] == [
        f"warning {line}" for line in expected(("target", "target"), ("draft", "draft"))
    ]
