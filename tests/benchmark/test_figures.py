"""Figures computed from turns."""

import json
from collections import Counter

import pytest

from draftwise.benchmark.contest import compete, make_cell
from draftwise.benchmark.figures import (
    Parameters,
    figures_of_cell,
    flops_per_token,
)
from draftwise.benchmark.titles import title_of
from draftwise.params import SamplingParams

from .fakes import Fake, records

CELL = make_cell("work", [[1], [2]], 2, 3)
STEPS = records(
    num_steps=4,
    num_prompt_tokens=10,
    num_request_steps=8,
    num_tokens=20,
    num_drafted=16,
    num_verified=12,
    num_accepted=9,
    decode_seconds=2.0,
    decode_tokens=18,
    seconds=Counter(draft=1.0, verify=3.0),
    verified_lengths=Counter({0: 2, 2: 6}),
    tested=Counter({0: 6, 1: 5}),
    accepted=Counter({0: 5, 1: 4}),
)


def figures(**fakes):
    everybody = [Fake("none", seconds=2.0), *fakes.values()]
    params = SamplingParams(max_tokens=5, temperature=0)
    results = compete(CELL, everybody, params)
    return figures_of_cell(CELL, results, {"a": Parameters(100, 10)}, 0.0, {"b": "is too slow"})


def test_figures_of_a_cell_are_json_compatible():
    cell = figures(a=Fake("a", records=STEPS))
    assert json.loads(json.dumps(cell)) == cell
    assert (cell["workload"], cell["batch_size"], cell["rounds"]) == ("work", 2, 3)
    assert title_of(cell) == "work, temperature 0, batch 2"


def test_reasons_of_contenders_that_did_not_run():
    assert figures()["left_out"] == {"b": "is too slow"}


def test_ratios_and_rates():
    own = figures(a=Fake("a", seconds=1.0))["contenders"]["a"]
    assert own["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert own["tokens_per_second"]["median"] == 10.0
    assert (own["num_tokens"], own["seconds"]) == (30, 3.0)
    assert (own["identical_answers"], own["answers"]) == (6, 6)
    assert own["repeated_share"] == 0.0


def test_figures_of_steps():
    own = figures(a=Fake("a", records=STEPS))["contenders"]["a"]
    assert own["accepted_length"] == 20 / 8
    assert own["acceptance_rate"] == 0.75
    assert (own["drafted_per_step"], own["verified_per_step"]) == (2.0, 1.5)
    assert own["decode_tokens_per_second"] == pytest.approx(9.0)
    assert own["share_of_time"]["verify"] == 0.75
    assert own["step_seconds"] == pytest.approx(1.0)
    assert own["verified_lengths"] == [6, 0, 18]
    assert own["acceptance_by_position"] == [5 / 6, 0.8]


def test_errors_are_reported():
    cell = figures(a=Fake("a", fails_at=0), b=Fake("b", fails_at=3))
    assert cell["contenders"]["a"] == {"error": "fell over"}
    assert cell["contenders"]["b"]["error"] == "fell over"
    assert cell["contenders"]["b"]["num_tokens"] == 10


def test_work_is_two_operations_for_each_parameter_and_token():
    sizes = Parameters(100, 10, 5)
    # Without a draft: the prompt's tokens and one for each step.
    alone = records(num_prompt_tokens=10, num_request_steps=8, num_tokens=8)
    assert flops_per_token(alone, sizes) == 2 * 100 * 18 / 8
    drafted = 2 * (100 * (18 + 12) + 10 * (18 + 16)) / 20
    assert flops_per_token(STEPS, sizes) == pytest.approx(drafted)
    assert flops_per_token(records(), sizes) == 0
