"""Detection of stalled and lost engines."""

import pytest

from draftwise.serving import health as module
from draftwise.serving.health import Liveness

from .clock import Clock


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_responding_engine_is_not_stalled(clock):
    liveness = Liveness(60.0)
    for _ in range(10):
        assert liveness.asked()
        clock.now += 0.3
        liveness.reported(None)
        clock.now += 100.0
        assert not liveness.is_stalled(False)
    assert liveness.silent_seconds == 0


def test_at_most_one_ping_is_unanswered(clock):
    liveness = Liveness(60.0)
    assert liveness.asked()
    clock.now += 0.5
    assert not liveness.asked()
    assert liveness.silent_seconds == 0.5
    liveness.reported(None)
    assert liveness.asked()


@pytest.mark.parametrize("is_busy", [False, True])
def test_an_unresponsive_engine_is_stalled_within_two_seconds(clock, is_busy):
    liveness = Liveness(60.0)
    liveness.reported(0.1)
    liveness.asked()
    clock.now += 1.0
    assert not liveness.is_stalled(is_busy)
    clock.now += 0.4
    # The ping was sent at most half a second after the engine's last report.
    assert module.PING_SECONDS + 1.4 < 2
    assert liveness.is_stalled(is_busy)
    liveness.reported(None)
    assert not liveness.is_stalled(is_busy)


def test_steps_as_slow_as_recent_ones_are_not_stalled(clock):
    liveness = Liveness(60.0)
    liveness.reported(4.0)
    liveness.asked()
    clock.now += 5.0
    assert not liveness.is_stalled(is_busy=True)
    assert liveness.is_stalled(is_busy=False)
    clock.now += 8.0
    assert liveness.is_stalled(is_busy=True)
    assert not liveness.is_lost


def test_a_slow_step_is_forgotten(clock):
    liveness = Liveness(60.0)
    liveness.reported(10.0)
    for _ in range(3000):
        liveness.reported(0.01)
    liveness.asked()
    clock.now += 3.0
    assert liveness.is_stalled(is_busy=True)


def test_an_engine_is_lost_after_the_timeout(clock):
    liveness = Liveness(60.0)
    liveness.asked()
    clock.now += 59.0
    assert not liveness.is_lost
    clock.now += 2.0
    assert liveness.is_lost
