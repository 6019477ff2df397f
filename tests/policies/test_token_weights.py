"""The value of an accepted token of each request."""

import itertools

import numpy as np
import pytest

from draftwise.policies.token_weights import TokenWeights

from .offering import latency, offering


def test_tokens_are_worth_the_same_while_others_follow():
    values = TokenWeights(latency())
    requests = offering((0.9,), (0.9,))
    assert values.weights(requests, 0).tolist() == [1.0, 1.0]
    requests[0] = requests[0]._replace(expected_remaining=50.0)
    assert values.weights(requests, 0).tolist() == [1.0, 1.0]


def test_tokens_of_the_request_that_ends_last_are_worth_more():
    values = TokenWeights(latency())
    requests = offering(*[(0.9,)] * 8, remaining=4.0)
    requests[3] = requests[3]._replace(expected_remaining=40.0)
    weights = values.weights(requests, 0)
    assert weights[3] == 1.0
    assert (np.delete(weights, 3) < 0.3).all()
    assert (weights > 0).all()
    # With equal ends, all are worth the same.
    assert values.weights(offering(*[(0.9,)] * 8, remaining=4.0), 0) == pytest.approx(1.0)


def test_a_token_is_worth_what_its_request_adds_to_the_steps_that_it_takes():
    """With certain ends, the time until all is done is the sum of steps times what they add."""
    values = TokenWeights(latency())
    remaining = [4000.0, 3000.0, 2000.0, 1000.0]
    requests = [
        request._replace(expected_remaining=each)
        for request, each in zip(offering(*[(1e-9,)] * 4), remaining, strict=True)
    ]
    steps = latency().target_curve(4)

    def until_all_is_done(lengths):
        ends = sorted(lengths, reverse=True)
        return sum(
            (end - following) * steps[running]
            for running, (end, following) in enumerate(itertools.pairwise([*ends, 0.0]), 1)
        )

    saved = [
        until_all_is_done(remaining)
        - until_all_is_done([each - (row == other) for other, each in enumerate(remaining)])
        for row in range(4)
    ]
    relative = np.array(saved) / np.mean(saved)
    assert values.weights(requests, 0) == pytest.approx(np.minimum(relative, 1.0), rel=1e-3)


def test_a_request_that_can_gain_fast_does_not_end_last():
    values = TokenWeights(latency())
    requests = offering((0.9,) * 8, (), remaining=30.0)
    requests[0] = requests[0]._replace(expected_remaining=60.0)
    for _ in range(30):
        assert values.weights(requests, 0).argmax() == 1
    # It will probably gain again, until it is forgotten.
    requests[0] = requests[0]._replace(offer=(0.01,))
    assert values.weights(requests, 0).argmax() == 1
    values.forget([0])
    assert values.weights(requests, 0).argmax() == 0
