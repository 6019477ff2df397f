"""`make test` leaves out combinations, never a policy or an execution path."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftwise.policies import POLICIES

from .levels import cover

ROOT = Path(__file__).parent.parent
LOSSLESS = {name for name, policy in POLICIES.items() if policy.lossless}

# A statistical test of each execution path, by its name and what its cases have in theirs.
PATHS = {
    "native": ("engine/test_lossless.py::test_texts_follow_the_target", "fixed"),
    "eager": ("engine/test_lossless.py::test_texts_without_native_kernels_follow_the_target", ""),
    "drafted position by position": (
        "engine/test_lossless.py::test_texts_drafted_position_by_position_follow_the_target",
        "",
    ),
    "recorded": ("cuda/test_lossless.py::test_texts_follow_the_target", "plain"),
    "penalties": ("cuda/test_lossless.py::test_texts_follow_the_target", "penalised"),
    "overlap": ("engine/test_lossless.py::test_texts_with_overlap_follow_the_target", ""),
    "another proposer": (
        "engine/test_proposers.py::test_texts_follow_the_target_with_every_policy",
        "",
    ),
    "replicas": ("engine/test_replicas.py::test_texts_follow_the_target", ""),
    "grammar": ("engine/test_structured_outputs.py::test_texts_follow_the_masked_target", ""),
    "minimum length": ("engine/test_min_tokens.py::test_texts_follow_the_masked_target", ""),
}
# Tests with a case for each policy.
EACH_POLICY = {
    "engine/test_lossless.py::test_texts_follow_the_target": LOSSLESS,
    "engine/test_greedy.py::test_with_every_policy": set(POLICIES),
}


@pytest.fixture(scope="module")
def selected():
    """Of each test that `make test` runs, the names of its cases."""
    files = {test.partition("::")[0] for test, _ in PATHS.values()}
    files |= {test.partition("::")[0] for test in EACH_POLICY}
    paths = [str(Path("tests", file)) for file in sorted(files)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not exhaustive", *paths]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    cases = {}
    for line in listed.stdout.splitlines():
        if found := re.fullmatch(r"tests/(\S+::\w+)(?:\[(.*)\])?", line):
            cases.setdefault(found[1], []).append(found[2] or "")
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_each_execution_path_is_tested_by_statistics(selected, path):
    test, part = PATHS[path]
    assert any(part in case for case in selected[test])


@pytest.mark.slow
@pytest.mark.parametrize("test", EACH_POLICY)
def test_each_policy_is_tested(selected, test):
    cases = selected[test]
    policies = sorted(POLICIES, key=len, reverse=True)
    found = {next(name for name in policies if case.startswith(name)) for case in cases}
    assert found == EACH_POLICY[test]


def test_a_few_cases_cover_every_value():
    policies, methods, sizes = "abcdef", ("block", "token"), ("1", "16", "512")
    cases = [list(case) for case in itertools.product(policies, methods, sizes)]
    chosen = [cases[index] for index in cover(cases)]
    assert len(chosen) == len(policies)
    for values, column in zip((policies, methods, sizes), zip(*chosen, strict=True), strict=True):
        assert {column.count(value) for value in values} == {len(policies) // len(values)}


def test_a_case_that_is_alone_with_a_value_is_chosen():
    cases = [["a", "x"], ["a", "x"], ["b", "x"], ["a", "y"]]
    assert cover(cases) == {0, 2, 3}
    assert cover([]) == set()
