"""Policies that decide after each drawn token: where they stop, and how they learn."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.errors import InvalidParameterError
from draftwise.policies import PolicyContext, RequestState, create_policy

from ..stand_ins import NO_TIMES, draft_position, fixed_latency, outcome, profile
from .driving import lengths_of

property_test = settings(deadline=None, derandomize=True, max_examples=50)

# Their entropies are 0.33, 1.05 and 1.39 nats.
DISTRIBUTIONS = [[0.9, 0.1, 0.0, 0.0], [0.4, 0.4, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]]


def create(name, gamma=5, **options):
    context = PolicyContext(gamma, fixed_latency(), profile(), has_companion=True)
    return create_policy(name, context, options)


def begin(policy, num_requests=3, limit=9, first_id=0, history=0.5):
    return lengths_of(
        policy,
        [RequestState(9, 3, limit, first_id + i, history=history) for i in range(num_requests)],
    )


def kept(policy, index=0, requests=(0, 1, 2), tokens=(0, 0, 0)):
    draft_probs = torch.tensor(DISTRIBUTIONS)[list(requests)]
    position = draft_position(index, requests, draft_probs, torch.tensor(tokens)[list(requests)])
    return policy.keep_drafting(position).tolist()


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.5, [False, False, False]), (0.77, [True, False, False]), (1.1, [True, True, False])],
)
def test_svip_stops_by_the_square_root_of_the_entropy(threshold, expected):
    policy = create("svip", threshold=threshold)
    assert begin(policy) == [5, 5, 5]
    assert kept(policy) == expected


def test_svip_stops_where_the_authors_code_does_by_default():
    policy = create("svip")
    entropies = torch.linspace(0, 2, 401)
    position = draft_position(0, (0,), [[1.0, 0.0]], [0])
    position = type(position)(0, (0,), position.tokens, position.draft_probs, entropies, None)
    theirs = (0.15 * entropies).sqrt() <= 0.3
    # The default h has two digits: 0.77² = 0.593, but 0.3²/0.15 = 0.6.
    ambiguous = (entropies > 0.59) & (entropies < 0.605)
    assert torch.equal(policy.keep_drafting(position)[~ambiguous], theirs[~ambiguous])


def test_confidence_stops_by_the_probability_of_the_drawn_token():
    policy = create("confidence", threshold=0.4)
    begin(policy)
    assert kept(policy) == [True, True, False]
    assert kept(policy, tokens=(1, 2, 3)) == [False, False, False]


def test_dyspec_stops_by_the_product_of_probabilities():
    policy = create("dyspec", threshold=0.2)
    begin(policy)
    assert kept(policy) == [True, True, True]  # 0.9, 0.4, 0.25
    assert kept(policy, 1) == [True, False, False]  # 0.81, 0.16, 0.06
    assert kept(policy, 2, requests=(0,)) == [True]  # 0.73
    assert kept(policy, 3, requests=(0,), tokens=(1, 0, 0)) == [False]  # 0.07
    begin(policy)
    assert kept(policy) == [True, True, True]


def test_heuristic_has_one_length_per_request():
    policy = create("heuristic", gamma=8)
    assert begin(policy) == [5, 5, 5]
    policy.observe(outcome([5, 5, 0], [5, 5, 0], [5, 4, 0]), NO_TIMES)
    assert begin(policy) == [7, 4, 5]
    policy.observe(outcome([7, 4, 5], [7, 4, 5], [7, 0, 5], failed=[2]), NO_TIMES)
    assert begin(policy) == [8, 3, 5]
    for _ in range(5):
        policy.observe(outcome([8, 3, 5], [8, 3, 5], [8, 0, 5]), NO_TIMES)
    assert begin(policy) == [8, 1, 8]
    assert begin(policy, limit=2) == [2, 1, 2]
    policy.forget([0, 77])
    assert begin(policy) == [5, 1, 8]


def test_heuristic_starts_within_the_maximum_length():
    policy = create("heuristic", gamma=3)
    assert begin(policy) == [3, 3, 3]
    policy.observe(outcome([3] * 3, [3] * 3, [3, 0, 0]), NO_TIMES)
    assert begin(policy) == [3, 2, 2]


def test_adaedl_stops_by_its_bound():
    policy = create("adaedl", threshold=0.6, entropy_factor=0.2)
    begin(policy)
    # 1 − √(0.2·H) is 0.75, 0.54 and 0.47.
    assert kept(policy) == [True, False, False]


def test_adaedl_thresholds_follow_the_acceptance_of_each_request():
    policy = create("adaedl", gamma=4, threshold=0.5, threshold_step=0.1)
    begin(policy)
    policy.observe(outcome([4, 4, 4], [4, 4, 4], [0, 4, 4]), NO_TIMES)
    policy.observe(outcome([4, 4, 3], [4, 4, 3], [0, 4, 3]), NO_TIMES)
    thresholds = [threshold.value for threshold in policy._step]
    # Request 0 has AR 0.45 and 0.225, so its λ rises twice. The others have AR ≥ 0.9: λ stays after
    # a step at the cap and falls after a step below the cap.
    assert thresholds == pytest.approx([0.52, 0.5, 0.49])
    rates = [threshold.acceptance_rate for threshold in policy._step]
    assert rates == pytest.approx([0.225, 0.975, 0.975])
    policy.observe(outcome([0, 4, 4], [0, 4, 4], [0, 4, 4], failed=[1]), NO_TIMES)
    assert [t.value for t in policy._step] == pytest.approx([0.52, 0.5, 0.49])
    begin(policy, first_id=1)
    assert [t.value for t in policy._step] == pytest.approx([0.5, 0.49, 0.5])
    policy.forget([2])
    begin(policy, first_id=1)
    assert [t.value for t in policy._step] == pytest.approx([0.5, 0.5, 0.5])


@property_test
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=60), st.floats(0, 1))
def test_adaedl_thresholds_stay_probabilities(steps, first):
    policy = create("adaedl", threshold=first, threshold_step=1.0, threshold_smoothing=0.0)
    begin(policy, 1)
    for drafted, accepted in steps:
        policy.observe(outcome([drafted], [drafted], [min(drafted, accepted)]), NO_TIMES)
        assert 0 <= policy._step[0].value <= 1


def test_disco_stops_by_the_heads_prediction():
    policy = create("disco")
    begin(policy)
    p = policy.p_accept(draft_position(0, (0, 1, 2), DISTRIBUTIONS, [0, 0, 0]))
    # More certain drafts have a higher estimate.
    assert p.tolist() == sorted(p.tolist(), reverse=True)
    between = float(p[1] + p[2]) / 2
    for threshold, expected in (
        (0.0, [True, True, True]),
        (between, [True, True, False]),
        (1.0, [False, False, False]),
    ):
        policy = create("disco", threshold=threshold)
        begin(policy)
        assert kept(policy) == expected


def test_disco_uses_position_and_history():
    policy = create("disco")
    begin(policy, history=0.5)
    position = draft_position(0, (0, 2), [DISTRIBUTIONS[0], DISTRIBUTIONS[2]], [0, 0])
    first = policy.p_accept(position)
    later = policy.p_accept(draft_position(3, (0, 2), [DISTRIBUTIONS[0], DISTRIBUTIONS[2]], [0, 0]))
    assert bool((later < first).all())
    begin(policy, history=0.9)
    assert not torch.equal(policy.p_accept(position), first)


def test_specdec_stops_by_the_probability_of_any_rejection():
    policy = create("specdec++", threshold=0.7)
    begin(policy)
    position = draft_position(0, (0, 1, 2), DISTRIBUTIONS, [0, 0, 0])
    p = policy.p_accept(position)
    assert policy.keep_drafting(position).tolist() == (1 - p <= 0.7).tolist()
    assert policy.keep_drafting(position).tolist() == (1 - p * p <= 0.7).tolist()
    assert policy.keep_drafting(position).tolist() == (1 - p**3 <= 0.7).tolist()


@pytest.mark.parametrize("name", ["disco", "specdec++"])
def test_a_profile_without_the_head_is_refused(name):
    empty = type(profile())({})
    with pytest.raises(InvalidParameterError) as caught:
        create_policy(name, PolicyContext(3, profile=empty), {})
    assert caught.value.field == "profile"
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("svip", "threshold", [-0.1, "0.5", True, math.inf, math.nan, None]),
        ("confidence", "threshold", [-0.1, 1.1, "a"]),
        ("dyspec", "threshold", [-0.1, 1.1]),
        ("disco", "threshold", [-0.1, 1.1]),
        ("specdec++", "threshold", [-0.1, 1.1]),
        ("adaedl", "threshold", [-0.1, 1.1]),
        ("adaedl", "entropy_factor", [-1]),
        ("adaedl", "target_acceptance", [2]),
        ("adaedl", "acceptance_smoothing", [-1, 2]),
        ("adaedl", "threshold_smoothing", [-1, 2]),
        ("adaedl", "threshold_step", [-1, 2]),
        ("smartspec", "smoothing", [-0.1, 1.0]),
        ("smartspec", "explore_every", [0, 1.5, True]),
        ("tetris", "extra", [-1, 65, 1.0, "1"]),
        ("tetris-published", "extra", [-1, 65]),
    ],
)
def test_options_out_of_range_are_refused(name, option, values):
    for value in values:
        with pytest.raises(InvalidParameterError) as caught:
            create(name, **{option: value})
        assert caught.value.field == f"policy_options.{option}"
