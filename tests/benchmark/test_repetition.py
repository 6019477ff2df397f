"""The share of repeated text."""

import pytest

from draftwise.benchmark.figures import repeated_share


@pytest.mark.parametrize(
    ("answers", "share"),
    [
        ([], 0.0),
        ([[]], 0.0),
        ([[1, 2, 3]], 0.0),
        ([list(range(20))], 0.0),
        # The second "1 2 3" is complete at its last token; "2 3 1" and "3 1 2" are new.
        ([[1, 2, 3, 1, 2, 3]], 1 / 6),
        ([[1, 2, 3] * 4], 7 / 12),
        ([[5] * 10], 7 / 10),
        ([[1, 2, 9, 1, 2, 8]], 0.0),
    ],
)
def test_a_token_is_repeated_if_it_completes_an_earlier_ngram(answers, share):
    assert repeated_share(answers, num_tokens=3) == pytest.approx(share)


def test_answers_do_not_repeat_each_other():
    assert repeated_share([[1, 2, 3]] * 4, num_tokens=3) == 0.0


def test_the_share_is_over_the_tokens_of_all_answers():
    assert repeated_share([[7] * 10, list(range(30))], num_tokens=3) == pytest.approx(7 / 40)


def test_the_ngram_has_eight_tokens():
    loop = list(range(8))
    assert repeated_share([loop * 2]) == 1 / 16
    assert repeated_share([[*loop[:7], 9, *loop[:7]]]) == 0.0
