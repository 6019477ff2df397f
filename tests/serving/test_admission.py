"""Admission control and retry times."""

import pytest

from draftwise.errors import InvalidParameterError
from draftwise.serving import admission as module
from draftwise.serving.admission import Admission
from draftwise.serving.errors import OverloadedError

from .clock import Clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def refusal(admission, count=1):
    with pytest.raises(OverloadedError) as refused:
        admission.enter(count)
    return refused.value.retry_after


def pass_places_on(admission, clock, count, seconds_each):
    """Requests end one after another, and others replace them."""
    for _ in range(count):
        clock.now += seconds_each
        admission.leave()
        admission.enter(1)


def busy(clock, seconds_each):
    """Two requests may run and two may wait; all places are taken, and requests end regularly."""
    admission = Admission(2, 2)
    admission.enter(4)
    pass_places_on(admission, clock, 20, seconds_each)
    return admission


def test_all_requests_or_none_are_admitted(clock):
    admission = Admission(2, 2)
    admission.enter(3)
    refusal(admission, 2)
    assert admission.num_inside == 3
    admission.enter(1)
    with pytest.raises(InvalidParameterError, match="5 answers"):
        admission.enter(5)


def test_default_retry_time_before_any_request_has_ended(clock):
    admission = Admission(1, 0)
    admission.enter(1)
    assert refusal(admission) == 1


def test_each_rejected_request_gets_its_own_retry_time(clock):
    """Requests end every two seconds, so places are free in two and in four seconds."""
    admission = busy(clock, 2.0)
    assert [refusal(admission) for _ in range(4)] == [2, 4, 6, 8]


def test_several_answers_wait_for_several_places(clock):
    admission = busy(clock, 2.0)
    assert refusal(admission, 3) == 6
    assert refusal(admission) == 8


def test_promised_places_expire(clock):
    admission = busy(clock, 2.0)
    assert [refusal(admission) for _ in range(3)] == [2, 4, 6]
    pass_places_on(admission, clock, 2, 2.0)  # at the same pace as before
    assert refusal(admission) == 4


def test_retry_times_are_limited(clock):
    admission = busy(clock, 50.0)
    assert [refusal(admission) for _ in range(3)] == [50, 60, 60]


def test_retry_times_of_a_fast_server_are_short(clock):
    """Requests end every 20 ms, so retry times are far below a second."""
    admission = busy(clock, 0.02)
    assert [refusal(admission) for _ in range(3)] == pytest.approx([0.02, 0.04, 0.06])
    assert refusal(busy(clock, 1e-6)) == pytest.approx(0.01)


def test_ends_before_an_idle_period_are_ignored(clock):
    """Occasional requests do not show the throughput of a busy server."""
    admission = Admission(2, 2)
    for _ in range(20):
        clock.now += 100.0
        admission.enter(1)
        clock.now += 1.0
        admission.leave()
    admission.enter(4)
    assert refusal(admission) == 1
    pass_places_on(admission, clock, 3, 2.0)
    assert refusal(admission) == 2


def test_old_ends_are_ignored(clock):
    admission = busy(clock, 5.0)
    pass_places_on(admission, clock, 11, 1.0)
    assert [refusal(admission) for _ in range(3)] == [1, 2, 3]
