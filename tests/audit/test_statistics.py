"""Tests of samples: their p-values, the correction for several tests, and their power."""

from collections import Counter

import numpy as np
import pytest

from draftwise.audit.statistics import (
    FEWEST_EXPECTED,
    fit_to_law,
    fit_to_samples,
    holm,
    pooled,
    together,
)

from ..core.statistics_tools import chi_square_p_value

CELLS = {"a": 0.4, "b": 0.3, "c": 0.2}
OTHER = 0.1
P = [*CELLS.values(), OTHER]


def counts(rng, p, number):
    return Counter(dict(zip("abcz", rng.multinomial(number, p).tolist(), strict=True)))


def test_p_values_are_those_of_pearsons_test():
    rng = np.random.default_rng(0)
    for _ in range(20):
        seen = counts(rng, [0.35, 0.35, 0.2, 0.1], 500)
        fit = fit_to_law(seen, CELLS, OTHER, 0.0)
        assert fit.p_value == pytest.approx(chi_square_p_value([seen[key] for key in "abcz"], P))
        assert fit.num_samples == 500


def test_an_impossible_text_is_a_failure_and_a_single_cell_is_none():
    impossible = fit_to_law(Counter(z=1, a=99), {"a": 0.5, "b": 0.5}, 0.0, 0.0)
    assert impossible.is_impossible
    assert impossible.p_value == 0.0
    assert together([impossible, fit_to_law(Counter(a=10), {"a": 1.0}, 0.0, 0.0)]).p_value == 0.0
    single = fit_to_law(Counter(a=100), {"a": 1.0}, 0.0, 0.0)
    assert single.p_value == 1.0
    assert single.power(0.5, 0.01) == 0.0
    assert single.smallest_bias(0.95, 0.01) is None


def test_rare_cells_are_pooled():
    expected = np.array([0.5, 300.0, 1.0, 2.0, 4.0, 900.0])
    first, second = pooled(expected.copy(), expected.copy(), expected)
    assert first.tolist() == second.tolist()
    assert first.sum() == expected.sum()
    assert first.min() >= FEWEST_EXPECTED
    assert sorted(first.tolist()) == [307.5, 900.0]  # the rest has less than a hundredth


@pytest.mark.parametrize("rounding", [0.0, 0.002])
def test_correct_samples_have_uniform_p_values_at_most(rounding):
    rng = np.random.default_rng(1)
    law = [fit_to_law(counts(rng, P, 400), CELLS, OTHER, rounding).p_value for _ in range(2000)]
    pairs = [(counts(rng, P, 400), counts(rng, P, 200)) for _ in range(2000)]
    samples = [fit_to_samples(*pair, rounding).p_value for pair in pairs]
    for p_values in (law, samples):
        share = np.mean(np.array(p_values) < 0.05)
        # Three standard deviations of 2,000 tests.
        assert share < 0.065
        assert rounding or share > 0.035


def test_the_power_is_at_least_what_is_stated():
    """Here the cells that gain have half of the probability, the worst case."""
    rng = np.random.default_rng(2)
    fair = {"a": 0.25, "b": 0.25, "c": 0.25}
    bias, number, level = 0.08, 800, 0.01
    biased = [0.25 + bias / 2, 0.25 + bias / 2, 0.25 - bias / 2, 0.25 - bias / 2]
    fits = [fit_to_law(counts(rng, biased, number), fair, 0.25, 0.0) for _ in range(1500)]
    share = np.mean([fit.p_value < level for fit in fits])
    assert share == pytest.approx(fits[0].power(bias, level), abs=0.04)
    smallest = fits[0].smallest_bias(0.95, level)
    assert fits[0].power(smallest, level) == pytest.approx(0.95, abs=0.01)
    uneven = [0.4 + bias, 0.3, 0.2, 0.1 - bias]
    fits = [fit_to_law(counts(rng, uneven, number), CELLS, OTHER, 0.0) for _ in range(500)]
    assert np.mean([fit.p_value < level for fit in fits]) > fits[0].power(bias, level)


def test_several_tests_together_see_a_smaller_bias():
    rng = np.random.default_rng(3)
    fits = [fit_to_law(counts(rng, P, 500), CELLS, OTHER, 0.0) for _ in range(10)]
    whole = together(fits)
    assert whole.num_samples == 5000
    assert whole.num_cells == 31
    assert whole.power(0.05, 0.01) > 2 * fits[0].power(0.05, 0.01)
    biased = [0.36, 0.26, 0.24, 0.14]
    fits = [fit_to_law(counts(rng, biased, 500), CELLS, OTHER, 0.0) for _ in range(10)]
    assert together(fits).p_value < min(fit.p_value for fit in fits)


def test_holms_correction():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]
