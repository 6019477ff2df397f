"""Who is let in, and what those are told who are not."""

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
    """So many requests end, one after the other, and others come in for them."""
    for _ in range(count):
        clock.now += seconds_each
        admission.leave()
        admission.enter(1)


def busy(clock, seconds_each):
    """Two may run and two wait; all places are taken, and requests end at some pace."""
    admission = Admission(2, 2)
    admission.enter(4)
    pass_places_on(admission, clock, 20, seconds_each)
    return admission


def test_all_or_none_are_let_in(clock):
    admission = Admission(2, 2)
    admission.enter(3)
    refusal(admission, 2)
    assert admission.num_inside == 3
    admission.enter(1)
    with pytest.raises(InvalidParameterError, match="5 answers"):
        admission.enter(5)


def test_nothing_is_known_before_anything_has_ended(clock):
    admission = Admission(1, 0)
    admission.enter(1)
    assert refusal(admission) == 1


def test_everybody_is_told_of_another_place(clock):
    """Requests end every two seconds: there is a place in two, and another one in four."""
    admission = busy(clock, 2.0)
    assert [refusal(admission) for _ in range(4)] == [2, 4, 6, 8]


def test_who_asks_for_several_answers_is_told_of_as_many_places(clock):
    admission = busy(clock, 2.0)
    assert refusal(admission, 3) == 6
    assert refusal(admission) == 8


def test_a_place_is_forgotten_when_it_should_have_been_taken(clock):
    admission = busy(clock, 2.0)
    assert [refusal(admission) for _ in range(3)] == [2, 4, 6]
    pass_places_on(admission, clock, 2, 2.0)  # at the same pace as before
    assert refusal(admission) == 4


def test_nobody_is_told_to_wait_for_long(clock):
    admission = busy(clock, 50.0)
    assert [refusal(admission) for _ in range(3)] == [50, 60, 60]


def test_a_fast_server_is_asked_again_soon(clock):
    """Requests end every 20 ms: no client has to wait a second."""
    admission = busy(clock, 0.02)
    assert [refusal(admission) for _ in range(3)] == pytest.approx([0.02, 0.04, 0.06])
    assert refusal(busy(clock, 1e-6)) == pytest.approx(0.01)


def test_what_was_before_a_pause_says_nothing(clock):
    """One request now and then is no sign of how fast a full server is."""
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


def test_a_pace_of_long_ago_says_nothing(clock):
    admission = busy(clock, 5.0)
    pass_places_on(admission, clock, 11, 1.0)
    assert [refusal(admission) for _ in range(3)] == [1, 2, 3]
