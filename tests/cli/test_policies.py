"""``draftwise policies`` as a user runs it."""

import json

import pytest

from draftwise.policies import POLICIES


@pytest.fixture
def listed(draftwise):
    """Run the command on a terminal with 100 columns; returns its output."""

    def run(*arguments):
        status, out, _ = draftwise("policies", *arguments, columns=100)
        assert status == 0
        return out

    return run


def test_json_describes_every_policy(listed):
    described = {each["name"]: each for each in json.loads(listed("--json"))}
    assert list(described) == list(POLICIES)
    for name, policy in POLICIES.items():
        assert described[name]["source"] == policy.source
        assert described[name]["summary"] == policy.summary
        assert set(described[name]["signals"]) == {signal.value for signal in policy.signals}
        assert described[name]["lossless"] is policy.lossless
    assert described["none"]["needs"] == []
    assert described["fixed"]["options"] == {}
    assert described["svip"]["options"] == {"threshold": 0.77}
    assert described["staged"]["needs"] == ["draft", "companion"]
    assert described["specdec++"]["needs"] == ["draft", "profile"]
    assert described["smartspec"]["needs"] == ["draft", "latency"]


def test_the_table_names_every_policy_and_fits(listed):
    lines = listed().splitlines()
    assert max(map(len, lines)) <= 100
    first_words = {line.split(" ")[0] for line in lines if not line.startswith(" ")}
    assert set(POLICIES) <= first_words
    assert "…" not in "".join(lines)
    published, _ = (line for line in lines if line.startswith("tetris-published "))
    assert "greedy only" in published
    assert "options: threshold = 0.77" in listed()
