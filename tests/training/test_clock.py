"""Training time without pauses of the process."""

from draftwise.training.clock import StepClock


def counted_by(durations):
    """What a clock counts of steps with these durations."""
    moments = [0.0]
    for duration in durations:
        moments += [moments[-1], moments[-1] + duration]
    times = iter(moments)
    clock = StepClock(lambda: next(times))
    counted = []
    for _ in durations:
        clock.start()
        counted.append(clock.stop())
    return counted


def test_a_pause_counts_as_an_ordinary_step():
    assert counted_by([1.0] * 16 + [600.0, 3.0, 1.0]) == [1.0] * 16 + [1.0, 3.0, 1.0]


def test_the_first_steps_count_in_full():
    assert counted_by([1.0, 49.0]) == [1.0, 49.0]


def test_short_slow_steps_count_in_full():
    assert counted_by([1.0] * 16 + [29.0, 1.0]) == [1.0] * 16 + [29.0, 1.0]


def test_a_lasting_slowdown_counts():
    counted = counted_by([1.0] * 16 + [50.0] * 32)
    assert counted[16] == 1.0
    assert counted[-20:] == [50.0] * 20
