"""How long ways take, told apart from how fast the machine is just now."""

import math

import numpy as np
import pytest

from draftwise.core.goodput import OperatingPoint, Promise
from draftwise.policies import experience
from draftwise.policies.experience import Experience

SHORT, LONG, NONE = OperatingPoint(1), OperatingPoint(5), OperatingPoint(0)
SELECTING = OperatingPoint(5, 0.3)
PROMISE = Promise(tokens=2.0, seconds=0.02, size=4.0, requests=2)


@pytest.fixture(autouse=True)
def selection_costs_nothing(monkeypatch):
    monkeypatch.setattr(experience, "_SELECTION_SECONDS", 0.0)


def run(seen, point, num_steps, factor=1.0):
    for _ in range(num_steps):
        seen.observe(point, PROMISE, PROMISE.seconds * factor)


def factor_of(seen, point):
    return seen.corrected(point, PROMISE).seconds / PROMISE.seconds


def test_promises_are_believed_before_anything_is_seen():
    seen = Experience()
    assert seen.corrected(LONG, PROMISE) == PROMISE
    assert seen.num_steps == 0


def test_a_machine_that_is_slower_is_slower_in_all_ways():
    seen = Experience()
    run(seen, SHORT, 60, 1.4)
    assert factor_of(seen, SHORT) == pytest.approx(1.4, rel=0.02)
    assert factor_of(seen, LONG) == pytest.approx(1.4, rel=0.02)
    assert factor_of(seen, NONE) == pytest.approx(1.4, rel=0.02)


def test_ways_are_told_apart():
    seen = Experience()
    run(seen, SHORT, 60)
    run(seen, LONG, 5, 1.2)
    # A few steps are not believed against the promise; many are.
    assert 1.02 < factor_of(seen, LONG) / factor_of(seen, SHORT) < 1.1
    run(seen, LONG, 150, 1.2)
    assert 1.12 < factor_of(seen, LONG) / factor_of(seen, SHORT) < 1.22


def test_a_disturbance_is_nobodys_fault():
    """The machine slows down while one way is in use, and is as fast again for the other."""
    disturbed, quiet = Experience(), Experience()
    for seen, slow in ((disturbed, 1.3), (quiet, 1.0)):
        run(seen, SHORT, 100)
        run(seen, LONG, 60)
        run(seen, SHORT, 80, slow)
        run(seen, SHORT, 40)
    ratios = [factor_of(seen, SHORT) / factor_of(seen, LONG) for seen in (disturbed, quiet)]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.03)


def test_a_trial_is_compared_with_the_machine_as_it_is_now():
    seen = Experience()
    run(seen, SHORT, 100)
    run(seen, SHORT, 60, 1.25)
    run(seen, LONG, 12, 1.25)
    assert factor_of(seen, LONG) == pytest.approx(factor_of(seen, SHORT), rel=0.02)


def test_one_kind_says_nothing_of_another():
    seen = Experience()
    run(seen, SHORT, 60)
    run(seen, SELECTING, 40, 1.2)
    like_it = factor_of(seen, OperatingPoint(5, 0.5))
    assert like_it > 1.05 * factor_of(seen, LONG)


def test_cold_steps_do_not_count():
    seen = Experience()
    run(seen, SHORT, experience._FIRST_STEPS, 2.9)
    assert factor_of(seen, SHORT) == 1.0
    run(seen, SHORT, 60)
    run(seen, LONG, experience._COLD_STEPS, 2.9)
    run(seen, LONG, 20)
    assert factor_of(seen, LONG) == pytest.approx(1.0, rel=0.02)


def test_a_pause_of_the_machine_is_hardly_believed():
    seen = Experience()
    run(seen, SHORT, 60)
    run(seen, SHORT, 1, 500.0)
    assert factor_of(seen, SHORT) < 1.03


def test_pauses_here_and_there_are_hardly_believed():
    """Every fifth step of a trial takes three times as long."""
    seen = Experience()
    run(seen, SHORT, 60)
    for step in range(30):
        run(seen, LONG, 1, 3.0 if step % 5 == 2 else 1.0)
    assert factor_of(seen, LONG) < 1.05


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_surprises_that_agree_are_believed(factor):
    seen = Experience()
    run(seen, SHORT, 60)
    run(seen, LONG, 12, factor)
    assert abs(math.log(factor_of(seen, LONG))) > 0.35 * abs(math.log(factor))


def test_noise_averages_out():
    random = np.random.default_rng(0)
    seen = Experience()
    for point, factor in ((SHORT, 1.0), (LONG, 1.1)) * 10:
        for _ in range(40):
            run(seen, point, 1, factor * math.exp(0.1 * random.standard_normal()))
    assert factor_of(seen, LONG) / factor_of(seen, SHORT) == pytest.approx(1.1, rel=0.04)


def test_what_is_little_known_may_be_better():
    seen = Experience()
    unknown = seen.optimism(LONG)
    run(seen, LONG, 30)
    known = seen.optimism(LONG)
    seen.fade(2000)
    assert unknown > seen.optimism(LONG) > known > 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_clocks_that_stand_still_teach_nothing(seconds):
    seen = Experience()
    run(seen, SHORT, 60)
    before = seen.corrected(SHORT, PROMISE)
    seen.observe(SHORT, PROMISE, seconds)
    assert seen.corrected(SHORT, PROMISE) == before
