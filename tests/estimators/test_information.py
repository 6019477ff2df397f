"""Information gain against closed forms."""

import numpy as np
import pytest

from draftwise.estimators.calibration import RunningCalibration
from draftwise.estimators.information import (
    information_gain,
    information_gains,
    pearson,
    was_tested,
)

from .synthetic import records_of, smooth_records


def binary_entropy(p):
    return -p * np.log2(p) - (1 - p) * np.log2(1 - p)


def test_a_deterministic_signal_has_the_full_gain():
    fates = np.array([0, 1] * 500)
    gain = information_gain(fates, 7 * fates)
    assert gain.entropy == pytest.approx(1)
    assert gain.plain == pytest.approx(1)
    assert gain.corrected == pytest.approx(1, abs=0.01)
    assert gain.plain == pytest.approx(gain.entropy, abs=1e-12)
    assert gain.num_cells == 2


def test_the_gain_of_a_known_mixture():
    """X is 1 with probability 0.9 in one half of the records and 0.3 in the other."""
    random = np.random.default_rng(0)
    cells = random.integers(0, 2, 40_000)
    fates = (random.random(40_000) < np.where(cells == 0, 0.9, 0.3)).astype(np.int64)
    expected = binary_entropy(0.6) - (binary_entropy(0.9) + binary_entropy(0.3)) / 2
    gain = information_gain(fates, cells)
    assert gain.plain == pytest.approx(expected, abs=0.01)
    assert gain.corrected == pytest.approx(expected, abs=0.01)
    # The same signal split into 100 random cells seems to gain more. The correction removes that.
    split = information_gain(fates, 100 * cells + random.integers(0, 100, 40_000))
    assert split.plain > gain.plain + 0.002
    assert split.corrected == pytest.approx(expected, abs=0.01)


def test_an_independent_companion_has_no_gain():
    random = np.random.default_rng(1)
    size = 4000
    records = records_of(random.random(size), random.random(size), np.full(size, 0.7))
    gains = information_gains(records)
    assert gains["S,A 20x20"].plain > 0.04
    for name, gain in gains.items():
        assert gain.entropy == pytest.approx(binary_entropy(0.7), abs=0.02)
        assert abs(gain.corrected) < 0.01, name


@pytest.mark.parametrize("fate", ["accepted", "acceptance"])
def test_finer_nested_bins_have_no_smaller_gain(fate):
    gains = information_gains(smooth_records(5000), fate)
    plain = [gains[f"S,A {binning}"].plain for binning in ("5x5", "10x10", "20x20")]
    assert plain == sorted(plain)
    assert plain[0] > 0.1
    for gain in gains.values():
        assert 0 <= gain.plain <= gain.entropy


def test_informative_signals_have_the_largest_gain():
    gains = information_gains(smooth_records(20_000))
    both, overlap, agreement = (gains[n].corrected for n in ("S,A adaptive", "S", "A"))
    assert both > agreement > overlap > 0.01
    for unrelated in ("H", "q(x)", "history"):
        assert abs(gains[unrelated].corrected) < 0.005


def test_binned_acceptance_probabilities_have_more_than_one_bit():
    assert information_gains(smooth_records(2000), "acceptance")["A"].entropy > 2


def test_only_tested_tokens_count():
    records = records_of(
        [0.5] * 12, [0.5] * 12, [1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0], chain_length=3
    )
    assert was_tested(records).tolist() == [
        *(True, True, False),
        *(True, True, True),
        *(True, False, False),
        *(True, True, True),
    ]


def test_no_records_have_no_gain():
    for gain in information_gains(smooth_records(0)).values():
        assert gain.plain == gain.corrected == gain.entropy == gain.num_cells == 0


class TestPearson:
    def test_points_on_a_line(self):
        x = np.linspace(0, 1, 50, dtype=np.float32)
        assert pearson(x, 3 * x + 1) == pytest.approx(1)
        assert pearson(x, -x) == pytest.approx(-1)

    def test_equals_numpy(self):
        x, y = np.random.default_rng(0).random((2, 200), dtype=np.float32)
        assert pearson(x, x + y) == pytest.approx(np.corrcoef(x, x + y)[0, 1], abs=1e-6)

    def test_weights_are_repetitions(self):
        x, y = np.random.default_rng(0).random((2, 20), dtype=np.float32)
        times = np.arange(20) % 3
        repeated = pearson(np.repeat(x, times), np.repeat(y, times))
        assert pearson(x, y, times.astype(np.float32)) == pytest.approx(repeated, abs=1e-6)

    def test_constant_values(self):
        assert pearson(np.ones(5, dtype=np.float32), np.arange(5, dtype=np.float32)) == 0


class TestRunningCalibration:
    def test_bins_count_by_their_weight(self):
        calibration = RunningCalibration()
        calibration.observe([0.05, 0.95], [0.0, 0.65], [3, 1])
        assert calibration.error == pytest.approx((3 * 0.05 + 0.3) / 4)

    def test_errors_in_one_bin_cancel(self):
        calibration = RunningCalibration()
        calibration.observe([0.72, 0.78, 1.0], [1, 0.5, 1])
        assert calibration.error == pytest.approx(0, abs=1e-12)

    def test_without_observations(self):
        assert RunningCalibration().error == 0
