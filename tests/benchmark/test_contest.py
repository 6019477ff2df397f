"""Interleaved runs of all contenders on the same prompts."""

import pytest

from draftwise.benchmark.contest import (
    WARM_UP_TURNS,
    compete,
    make_cell,
    num_identical,
    ratios,
)
from draftwise.params import SamplingParams

from .fakes import Fake

PROMPTS = [[i] for i in range(5)]
PARAMS = SamplingParams(max_tokens=4, temperature=0)


def test_prompts_are_divided_between_rounds_cyclically():
    cell = make_cell("work", PROMPTS, 2, 4)
    assert cell.question_ids == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert cell.rounds[2] == [[4], [0]]
    assert cell.untimed_rounds == [[[0], [1]], [[2], [3]]]


def test_few_prompts_of_many_are_spread_over_the_workload():
    cell = make_cell("work", [[i] for i in range(10)], 2, 2)
    assert cell.question_ids == [[0, 2], [5, 7]]
    assert cell.untimed_rounds == [[[1], [3]], [[4], [6]], [[8], [9]]]


def test_a_batch_may_be_larger_than_what_is_left_for_untimed_turns():
    cell = make_cell("work", PROMPTS, 4, 1)
    assert cell.question_ids == [[0, 1, 2, 3]]
    assert cell.untimed_rounds == [[[4]] * 4]


def test_all_contenders_answer_the_same_prompts_with_equal_lengths():
    cell = make_cell("work", PROMPTS, 2, 3)
    both = Fake("none"), Fake("other", seconds=0.5)
    params = SamplingParams(max_tokens=4, temperature=0.5, seed=9, stop="x", ignore_eos=True)
    results = compete(cell, both, params)
    for each in both:
        timed = each.calls[WARM_UP_TURNS:]
        assert [prompts for prompts, _ in timed] == cell.rounds
        for number, (_, params) in enumerate(timed):
            assert [p.seed for p in params] == [9 + 2 * number, 10 + 2 * number]
            assert all(p.ignore_eos and not p.stop and p.max_tokens == 4 for p in params)
    assert results["other"].tokens_per_second == [16.0] * 3
    assert ratios(results, "other") == [2.0] * 3


def test_answers_can_end_at_the_end_of_the_sequence():
    fake = Fake("none")
    compete(make_cell("w", PROMPTS, 1, 1), [fake], SamplingParams(max_tokens=4, ignore_eos=False))
    assert not any(params[0].ignore_eos for _, params in fake.calls)


def test_warm_up_is_short_and_untimed():
    fake = Fake("none")
    results = compete(make_cell("w", PROMPTS, 1, 2), [fake], SamplingParams(max_tokens=500))
    assert [params[0].max_tokens for _, params in fake.calls] == [32, 32, 500, 500]
    assert len(results["none"].turns) == 2


def test_contenders_that_learn_have_untimed_turns():
    fakes = Fake("none"), Fake("b", learns=True)
    cell = make_cell("w", PROMPTS, 1, 3)
    params = SamplingParams(max_tokens=4, temperature=0.5, seed=9)
    results = compete(cell, fakes, params, learning_turns=4)
    assert [len(fake.calls) for fake in fakes] == [2 + 3, 2 + 4 + 3]
    learning, timed = fakes[1].calls[2:6], fakes[1].calls[6:]
    # They are about other prompts, with other random numbers.
    prompts = [each for each, _ in learning]
    assert sorted(prompts) == sorted(2 * cell.untimed_rounds)
    assert not any(each in cell.rounds for each in prompts)
    seeds = [{own.seed for _, each in calls for own in each} for calls in (learning, timed)]
    assert seeds[0].isdisjoint(seeds[1])
    assert [len(result.turns) for result in results.values()] == [3, 3]


def test_the_order_changes():
    seen = []
    compete(make_cell("w", PROMPTS, 1, 12), [Fake("none"), Fake("b")], PARAMS, on_turn=seen.append)
    pairs = {tuple(seen[i : i + 2]) for i in range(2 * WARM_UP_TURNS, len(seen), 2)}
    assert pairs == {("none", "b"), ("b", "none")}


@pytest.mark.parametrize(("fails_at", "turns"), [(0, 0), (2, 0), (4, 2)])
def test_a_failed_contender_is_excluded_and_the_others_continue(fails_at, turns):
    fakes = Fake("none"), Fake("b", fails_at=fails_at)
    results = compete(make_cell("w", PROMPTS, 1, 5), fakes, PARAMS)
    assert len(results["none"].turns) == 5
    assert len(results["b"].turns) == turns
    assert results["b"].error == "fell over"
    assert len(ratios(results, "b")) == turns


def test_contenders_that_do_not_support_the_cell_are_left_out():
    results = compete(make_cell("w", PROMPTS, 2, 2), [Fake("none"), Fake("b", largest=1)], PARAMS)
    assert list(results) == ["none"]


def test_answers_are_compared_with_target_only_decoding():
    cell = make_cell("w", PROMPTS, 2, 2)
    same, different = Fake("same"), Fake("different", token=8)
    results = compete(cell, [Fake("none"), same, different], PARAMS)
    assert num_identical(results, "same") == (4, [])
    assert num_identical(results, "different") == (0, [0] * 4)
    results["same"].turns[0].answers[0][2] = 1
    results["same"].turns[0].answers[1].pop()
    assert num_identical(results, "same") == (2, [2, 3])
