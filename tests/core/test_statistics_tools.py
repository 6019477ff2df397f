"""The statistical tools must detect wrong distributions."""

import numpy as np
import pytest
import torch
from scipy import stats

from ..refusals import error_of
from .statistics_tools import (
    Tree,
    chi_square_p_value,
    integer_tree,
    prefix_codes,
    random_tree,
    sequence_counts,
    total_variation,
)


def test_p_values_of_true_samples_are_uniform():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(40, 0.3))
    p_values = [chi_square_p_value(rng.multinomial(20_000, p), p) for _ in range(300)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_biased_samples_are_found():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(40))
    biased = p.copy()
    biased[0] += 0.01
    counts = rng.multinomial(100_000, biased / biased.sum())
    assert chi_square_p_value(counts, p) < 1e-6


def test_agrees_with_scipy_where_nothing_is_pooled():
    counts, p = [30, 50, 20], [0.25, 0.5, 0.25]
    expected = stats.chisquare(counts, np.asarray(p) * 100).pvalue
    assert chi_square_p_value(counts, p) == pytest.approx(expected)


def test_rare_cells_are_pooled():
    for counts, p, pooled_counts, pooled_p in [
        # Expected 1 and 4 are too rare even together: they take in the next rarest.
        ([2, 60, 9, 29], [0.01, 0.55, 0.04, 0.40], [40, 60], [0.45, 0.55]),
        ([8, 7, 85], [0.06, 0.06, 0.88], [15, 85], [0.12, 0.88]),
        ([3, 27, 70], [0.02, 0.28, 0.70], [30, 70], [0.30, 0.70]),
    ]:
        expected = stats.chisquare(pooled_counts, np.asarray(pooled_p) * 100).pvalue
        assert chi_square_p_value(counts, p) == pytest.approx(expected)


def test_impossible_outcomes_have_p_value_zero():
    assert chi_square_p_value([1, 99_999, 100_000], [0.0, 0.5, 0.5]) == 0.0
    assert chi_square_p_value([0, 10], [0.0, 1.0]) == 1.0


def test_invalid_input_is_refused():
    for counts, p in [([1, 2], [1.0]), ([1, 2], [0.5, 0.6]), ([1, 2], [1.5, -0.5])]:
        error_of(
            chi_square_p_value,
            counts,
            p,
            error=ValueError,
            match=r"shapes differ|the expected distribution",
        )


@pytest.mark.parametrize("make", [random_tree, integer_tree])
def test_tree_is_a_distribution_and_samples_follow_it(make):
    generator = torch.Generator().manual_seed(1)
    tree = make(3, 3, generator)
    joint = tree.joint()
    assert joint.shape == (27,)
    assert float(joint.sum()) == pytest.approx(1.0)
    nothing = torch.zeros(50_000, 1, dtype=torch.int64)
    tokens = tree.complete(nothing, torch.zeros(50_000, dtype=torch.int64), generator)
    assert chi_square_p_value(sequence_counts(tokens, 3), joint) > 1e-4


def test_tree_completes_after_the_given_tokens():
    generator = torch.Generator().manual_seed(2)
    tree = random_tree(3, 3, generator)
    given = torch.tensor([2, 1]).expand(50_000, 2)
    tokens = tree.complete(given, torch.full((50_000,), 2), generator)
    assert bool((tokens[:, :2] == given).all())
    counts = torch.bincount(tokens[:, 2], minlength=3)
    assert chi_square_p_value(counts, tree.conditionals[2][2 * 3 + 1]) > 1e-4


def test_tree_along_a_path():
    tree = Tree((torch.tensor([[0.25, 0.75]]), torch.tensor([[0.1, 0.9], [0.6, 0.4]])))
    met = tree.along(torch.tensor([[1, 0]]))
    expected = torch.tensor([[[0.25, 0.75], [0.6, 0.4], [0.0, 0.0]]])
    torch.testing.assert_close(met, expected.double(), rtol=0, atol=1e-6)
    assert prefix_codes(torch.tensor([[1, 0]]), 2).tolist() == [[0, 1, 2]]


def test_total_variation():
    assert total_variation(torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])) == pytest.approx(0.4)
