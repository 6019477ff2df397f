import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.types import Draft
from draftwise.errors import InvalidParameterError
from draftwise.policies import (
    POLICIES,
    Policy,
    PolicyContext,
    RequestState,
    create_policy,
    policy_class,
)

from ..stand_ins import draft_signals, fixed_latency, profile
from .driving import World, lengths_of, one_second, outcome_of, take_step

each_policy = pytest.mark.parametrize("name", POLICIES)
property_test = settings(deadline=None, derandomize=True, max_examples=50)
states = st.lists(
    st.builds(
        RequestState,
        num_tokens=st.integers(1, 1000),
        num_output_tokens=st.integers(0, 100),
        draft_limit=st.integers(0, 20),
        request_id=st.integers(0, 99),
        greedy=st.booleans(),
        history=st.floats(0, 1),
        policy=st.none(),
        offer=st.lists(st.floats(0, 1), max_size=12),
        has_model=st.booleans(),
        num_behind=st.integers(0, 9),
    ),
    max_size=40,
)


def context(gamma):
    return PolicyContext(gamma, fixed_latency(), profile(), has_companion=True, for_studies=True)


@each_policy
def test_every_policy_describes_itself(name):
    policy = POLICIES[name]
    assert policy.name == name
    assert issubclass(policy, Policy)
    assert policy.summary
    assert policy.source
    assert policy.__doc__
    assert policy_class(name) is policy


@pytest.mark.slow
@each_policy
@property_test
@given(states, st.integers(0, 10))
def test_draft_lengths_respect_the_limits(name, requests, gamma):
    lengths = lengths_of(create_policy(name, context(gamma), {}), requests)
    assert len(lengths) == len(requests)
    for length, request in zip(lengths, requests, strict=True):
        assert isinstance(length, int)
        assert 0 <= length <= min(gamma, request.draft_limit)
        assert POLICIES[name].needs_draft or length == 0


@each_policy
def test_proposals_do_not_exceed_the_drafts_distributions(name):
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3, 3, 5, generator=generator).softmax(dim=2)
    lengths = (2, 0, 1)
    for request, length in enumerate(lengths):
        probs[request, length:] = 0
    tokens = torch.tensor([[1, 2], [0, 0], [4, 0]])
    policy = create_policy(name, context(2), {})
    lengths_of(policy, [RequestState(9, 3, 2, index) for index in range(3)])
    draft = Draft(tokens, lengths, probs.clone(), draft_signals(probs, tokens))
    plan = policy.select(draft, None)
    assert torch.equal(plan.tokens, tokens)
    assert plan.proposals is not None
    assert bool((plan.proposals <= probs).all())
    for request, (length, drafted) in enumerate(zip(plan.lengths, lengths, strict=True)):
        assert 0 <= length <= drafted
        for position in range(length):
            assert plan.proposals[request, position, tokens[request, position]] > 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [("fixd", "did you mean 'fixed'?"), ("nothing like it", "policies are none, fixed")],
)
def test_unknown_policies_are_refused(name, hint):
    with pytest.raises(InvalidParameterError) as caught:
        policy_class(name)
    assert caught.value.field == "policy"
    assert hint in caught.value.message


@each_policy
def test_unknown_options_are_refused(name):
    with pytest.raises(InvalidParameterError) as caught:
        create_policy(name, context(3), {"no_such_option": 1})
    assert caught.value.field == "policy_options.no_such_option"


@pytest.mark.parametrize("name", ["self", "context"])
def test_internal_parameters_are_refused_as_options(name):
    with pytest.raises(InvalidParameterError):
        create_policy("fixed", context(3), {name: 1})


def test_the_registry_cannot_be_changed_from_outside():
    with pytest.raises(TypeError):
        POLICIES["mine"] = Policy


CUTTING = [n for n, p in POLICIES.items() if not (p.filters or p.replaces_tokens)]


@pytest.mark.parametrize("name", CUTTING)
def test_policies_without_filters_only_cut(name):
    policy = create_policy(name, context(4), {})
    num_cut = 0
    for seed in range(60):
        world = World.random(4, 4, seed=seed)
        step = take_step(policy, world)
        plan, width = step.plan, step.plan.tokens.shape[1]
        for row, length in enumerate(plan.lengths):
            assert torch.equal(plan.proposals[row, :length], step.q[row, :length])
            if length <= width:
                assert not plan.proposals[row, length:].any()
            num_cut += length < step.draft.lengths[row]
        policy.observe(outcome_of(world, step), one_second())
    assert num_cut == 0 or name == "sv-predictable"
