"""The order of turns, and ratios of turns."""

import math

import pytest

from draftwise.benchmark.turns import (
    in_turns,
    median_ratio,
    ratios_of_turns,
    spread,
    time_calls,
    time_pairs,
)


def test_everybody_has_a_turn_in_every_round_in_a_changing_order():
    turns = list(in_turns("abcd", 20))
    rounds = [[who for number, who in turns if number == each] for each in range(20)]
    assert all(sorted(order) == list("abcd") for order in rounds)
    assert len({tuple(order) for order in rounds}) > 5
    assert turns == list(in_turns("abcd", 20))


def test_ratios_are_of_the_rounds_that_both_completed():
    assert ratios_of_turns([2.0, 3.0, 9.0], [1.0, 2.0]) == [2.0, 1.5]


def test_spread_is_median_and_quartiles():
    assert spread([4, 1, 2, 3, 5]) == {"median": 3, "low": 2, "high": 4}
    assert spread([]) == {}


def test_the_median_ratio_has_a_standard_error():
    ratio, error = median_ratio([1.0, 2.0, 4.0], [2.0, 6.0, 4.0])
    assert ratio == 2.0
    assert error == pytest.approx(1 / 3**0.5)
    assert math.isnan(median_ratio([1.0], [2.0])[1])


def test_both_sides_of_a_shape_follow_one_another():
    asked = []

    def seconds_of(side, shape):
        asked.append((side, shape))
        return float(len(asked))

    seconds = time_pairs("ab", 2, seconds_of)
    assert [asked[at][1] for at in range(0, 12, 2)] == [asked[at][1] for at in range(1, 12, 2)]
    assert [asked[at][0] for at in range(12)] == [1, 0] * 2 + [0, 1] * 2 + [1, 0] * 2
    counted = [
        [at + 1.0 for at in range(4, 12) if asked[at] == (s, n)] for n in "ab" for s in (0, 1)
    ]
    assert list(seconds.values()) == counted


def test_untimed_rounds_are_not_counted():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    times = time_calls(calls, 3, num_untimed=1)
    assert sorted(called) == list("aaaabbbb")
    assert [len(times[name]) for name in "ab"] == [3, 3]
    assert all(each >= 0 for own in times.values() for each in own)
