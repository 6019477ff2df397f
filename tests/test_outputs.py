from draftwise.outputs import SpeculationStats


def test_rates_before_any_step():
    stats = SpeculationStats()
    assert stats.mean_accepted_length == 0
    assert stats.acceptance_rate == 0


def test_rates():
    stats = SpeculationStats(
        num_steps=4, num_drafted=16, num_verified=12, num_accepted=9, num_tokens=13
    )
    assert stats.mean_accepted_length == 13 / 4
    assert stats.acceptance_rate == 9 / 12


def test_sums():
    stats = SpeculationStats(True, 1, 2, 3, 4, 5)
    stats.add(SpeculationStats(True, 10, 20, 30, 40, 50))
    assert stats == SpeculationStats(True, 11, 22, 33, 44, 55)
    stats.add(SpeculationStats(lossless=False))
    assert stats == SpeculationStats(False, 11, 22, 33, 44, 55)


def test_savings_are_summed_and_unknown_if_any_is_unknown():
    stats = SpeculationStats(seconds_saved=0.5)
    stats.add(SpeculationStats(seconds_saved=-0.75))
    assert stats.seconds_saved == -0.25
    stats.add(SpeculationStats(seconds_saved=None))
    stats.add(SpeculationStats(seconds_saved=1.0))
    assert stats.seconds_saved is None
