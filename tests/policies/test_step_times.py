"""Estimated times of steps against simulated machines."""

import random

import pytest

from draftwise.policies.step_times import COPIES, StepTimes


def observed(*steps):
    times = StepTimes()
    for kind, ratio in steps:
        times.observe(kind, ratio)
    return times


def test_the_profile_is_believed_before_any_step():
    times = StepTimes()
    assert times.factor(0) == times.factor(3) == times.factor(COPIES) == 1.0
    assert times.weight(0) == 1.0
    assert times.weight(3) == 0.0


def test_all_kinds_follow_the_pace_of_the_machine():
    times = observed(*[(0, 2.0)] * 6)
    assert times.factor(0) == pytest.approx(2.0, rel=0.05)
    assert times.factor(5) == pytest.approx(2.0, rel=0.05)


def test_a_single_pause_changes_little():
    steady = [(0, 1.0), (3, 1.0)] * 20
    times = observed(*steady, (3, 30.0))
    assert times.factor(3) == pytest.approx(1.0, rel=0.02)
    assert times.factor(0) == pytest.approx(1.0, rel=0.02)


def test_kinds_have_corrections_of_their_own():
    """Drafts of three tokens take 1.3 times as long as the profile says, on a noisy machine."""
    noise = random.Random(0)
    times = StepTimes()
    for step in range(300):
        kind = (0, 3)[step % 4 != 0]
        times.observe(kind, (1.3 if kind else 1.0) * noise.lognormvariate(0.0, 0.05))
    assert times.factor(0) == pytest.approx(1.0, rel=0.05)
    assert times.factor(3) == pytest.approx(1.3, rel=0.05)


def test_a_kind_without_observations_has_the_correction_of_the_nearest():
    steps = [(0, 1.0), (1, 1.0), (5, 1.4)] * 40
    times = observed(*steps)
    assert times.factor(7) == pytest.approx(times.factor(5), rel=0.01)
    assert times.factor(2) == pytest.approx(times.factor(1), rel=0.01)


def test_a_wrong_profile_is_corrected_within_few_steps():
    times = observed(*[(0, 1.0)] * 2, *[(3, 2.0)] * 4)
    assert times.factor(3) > 1.5
