import pytest

from draftwise.core.stage_cost import StageCost
from draftwise.errors import InvalidParameterError
from draftwise.policies import PolicyContext, RequestState, create_policy

from ..stand_ins import NO_TIMES, FixedLatency, outcome
from .driving import lengths_of


def create(target, draft, gamma=6, first_extra=0.0, **options):
    """A machine where n tokens cost ``target`` + n and a pass of the draft costs ``draft``."""
    latency = FixedLatency(
        StageCost((1, 1001), (target + 1, target + 1001)),
        StageCost((1, 1000), (draft, draft), first_extra=first_extra),
    )
    return create_policy("smartspec", PolicyContext(gamma, latency), options)


def states(count, limit=9):
    return [RequestState(20, 3, limit, index) for index in range(count)]


def test_goodput_is_expected_tokens_divided_by_seconds():
    policy = create(target=100, draft=5)
    alpha = policy.acceptance_rate
    assert alpha == pytest.approx(0.7)
    # Three passes of the draft, and 2·4 tokens through the target.
    expected = 2 * (1 + alpha + alpha**2 + alpha**3) / (100 + 8 + 15)
    assert policy.goodput(3, states(2)) == pytest.approx(expected, rel=1e-6)
    # One request has room for one token only.
    mixed = [*states(1), *states(1, limit=1)]
    expected = (1 + alpha + alpha**2 + alpha**3 + 1 + alpha) / (100 + 6 + 15)
    assert policy.goodput(3, mixed) == pytest.approx(expected, rel=1e-6)


def test_the_first_pass_of_the_draft_costs_more():
    policy = create(target=100, draft=5, first_extra=7)
    alpha = policy.acceptance_rate
    assert policy.goodput(2, states(1)) == pytest.approx((1 + alpha + alpha**2) / (103 + 10 + 7))
    assert policy.goodput(0, states(1)) == pytest.approx(1 / 101)


def test_the_length_has_the_best_goodput_for_the_batch():
    for num_requests in (1, 4, 16, 64, 256):
        policy = create(target=100, draft=2)
        requests = states(num_requests)
        best = max(range(7), key=lambda k: policy.goodput(k, requests))
        assert lengths_of(policy, requests) == [best] * num_requests
    few, many = (lengths_of(create(target=100, draft=2), states(n))[0] for n in (1, 256))
    assert few > 3
    assert many == 0


def test_lengths_respect_each_requests_limit():
    policy = create(target=1000, draft=0.001)
    mixed = [*states(1, limit=0), *states(1, limit=2), *states(1)]
    assert lengths_of(policy, mixed) == [0, 2, 6]
    assert lengths_of(policy, []) == []
    assert lengths_of(policy, states(2, limit=0)) == [0, 0]


def test_the_length_follows_acceptance():
    policy = create(target=100, draft=10, explore_every=1000)
    lengths = []
    for accepted in (4, 0):
        for _ in range(200):
            lengths_of(policy, states(1))
            policy.observe(outcome([4], [4], [accepted]), NO_TIMES)
        lengths.append(lengths_of(policy, states(1))[0])
    assert policy.acceptance_rate < 0.05
    assert lengths == [6, 0]


def test_acceptance_rate_ignores_tokens_after_a_rejection():
    policy = create(target=100, draft=2, smoothing=0.0)
    policy.observe(outcome([3, 3, 0, 3], [3, 3, 0, 3], [3, 1, 0, 2], failed=[3]), NO_TIMES)
    # Four accepted, one rejected, and one after the rejection.
    assert policy.acceptance_rate == pytest.approx(4 / 5)
    policy.observe(outcome([0, 0], [0, 0], [0, 0]), NO_TIMES)
    assert policy.acceptance_rate == pytest.approx(4 / 5)


def test_one_token_is_drafted_at_intervals_to_learn():
    policy = create(target=0.001, draft=100, explore_every=8)
    lengths = [lengths_of(policy, states(2))[0] for _ in range(32)]
    assert lengths == [0, 0, 0, 0, 0, 0, 0, 1] * 4
    # A step in which no request could draft does not count.
    for _ in range(20):
        lengths_of(policy, states(2, limit=0))
    assert [lengths_of(policy, states(2))[0] for _ in range(8)] == [0] * 7 + [1]


def test_step_costs_are_required():
    with pytest.raises(InvalidParameterError) as caught:
        create_policy("smartspec", PolicyContext(3), {})
    assert caught.value.field == "latency_profile"
