"""Expected numbers of accepted tokens, and the draft length that they advise."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.draft_length import advised_draft_length, expected_accepted

from ..refusals import error_of

property_test = settings(deadline=None, derandomize=True, max_examples=60)
probabilities = st.floats(0.0, 1.0)


@property_test
@given(probabilities, st.integers(0, 8))
def test_expected_accepted_equals_the_sum_over_all_outcomes(acceptance, num_tokens):
    """Each combination of accepted and rejected tokens counts by its probability."""
    expected = 0.0
    for kept in itertools.product([True, False], repeat=num_tokens):
        probability = math.prod(acceptance if each else 1 - acceptance for each in kept)
        expected += probability * len(list(itertools.takewhile(bool, kept)))
    assert expected_accepted(acceptance, num_tokens) == pytest.approx(expected, abs=1e-9)


def test_advised_draft_length():
    for mean_accepted, num_drafted, advised in [
        (3, 10, 4),
        (0, 5, 1),
        (0.2, 1, 1),
        (2.6, 5, 4),
        (4.4, 5, 5),
        (4.5, 5, 10),
        (1, 1, 2),
    ]:
        assert advised_draft_length(mean_accepted, num_drafted) == advised


def test_impossible_statistics_are_refused():
    for mean, num in [(-0.1, 3), (3.1, 3), (0, 0), (math.nan, 3)]:
        error_of(advised_draft_length, mean, num, error=ValueError, match="mean_accepted")
