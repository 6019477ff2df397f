"""The choice between chains and trees follows their measured goodput."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwise.core.types import Outcome
from draftwise.policies import create_policy
from draftwise.policies.base import PolicyContext
from draftwise.policies.inputs import RequestState
from draftwise.policies.router import PolicyRouter
from draftwise.policies.shapes import ShapeChoice

from ..stand_ins import NO_TIMES, fixed_latency

CHAIN, TREE = (3.0, 1.0), (4.2, 1.5)  # tokens per request and relative duration of a step


def run(choice, chain, tree, num_steps, num_requests=1, seed=0):
    """Run steps with given means, and return which had trees and the achieved goodput."""
    random = np.random.default_rng(seed)
    branches, tokens, duration = [], 0.0, 0.0
    for _ in range(num_steps):
        branches.append(choice.branches(num_requests))
        mean, usual = tree if branches[-1] else chain
        gained = 1 + float(random.binomial(8, (mean - 1) / 8, num_requests).mean())
        took = usual * random.lognormal(0.0, 0.05)
        choice.observe(gained, took)
        tokens, duration = tokens + gained, duration + took
    return branches, tokens / duration


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("factor", [0.5, 0.8, 0.93, 1.0, 1.07, 1.25, 2.0])
def test_little_is_lost_to_the_better_shape(factor, num_requests):
    tree = (TREE[0], TREE[0] / (factor * CHAIN[0] / CHAIN[1]))
    best = max(CHAIN[0] / CHAIN[1], tree[0] / tree[1])
    goodputs = [
        run(ShapeChoice(), CHAIN, tree, 3000, num_requests, seed)[1] / best for seed in range(5)
    ]
    assert np.mean(goodputs) > 0.975


def test_the_worse_shape_is_rarely_used():
    for tree, share in (((4.2, 3.0), (0.0, 0.05)), ((4.2, 0.7), (0.95, 1.0))):
        branches, _ = run(ShapeChoice(), CHAIN, tree, 2000)
        assert share[0] <= np.mean(branches[200:]) <= share[1]


def test_a_change_of_the_workload_is_followed():
    choice = ShapeChoice()
    run(choice, CHAIN, (4.2, 2.0), 1500)
    branches, _ = run(choice, CHAIN, (4.2, 1.05), 2500)
    assert np.mean(branches[-1000:]) > 0.8


def test_shapes_take_turns_of_several_steps():
    branches, _ = run(ShapeChoice(), CHAIN, TREE, 400)
    changes = np.flatnonzero(np.diff(branches)) + 1
    assert len(changes) > 1
    assert all(change % 8 == 0 for change in changes)


def test_another_batch_size_begins_with_what_is_known():
    choice = ShapeChoice()
    run(choice, CHAIN, (4.2, 3.0), 400, num_requests=4)
    branches, _ = run(choice, CHAIN, (4.2, 3.0), 100, num_requests=16)
    assert np.mean(branches) < 0.1


@pytest.mark.parametrize("sizes", [(1, 16), (16, 1)])
def test_the_better_shape_may_differ_between_batch_sizes(sizes):
    choice = ShapeChoice()
    run(choice, CHAIN, (4.2, 1.05), 600, sizes[0])
    branches, _ = run(choice, CHAIN, (4.2, 2.5), 400, sizes[1])
    assert np.mean(branches[-200:]) < 0.2


def test_a_pause_of_the_machine_decides_nothing():
    choice = ShapeChoice()
    run(choice, CHAIN, (4.2, 1.1), 400)
    while not choice.branches(1):
        choice.observe(3, 1.0)
    choice.observe(4, 6000.0)
    branches, _ = run(choice, CHAIN, (4.2, 1.1), 400)
    assert np.mean(branches) > 0.7


@pytest.mark.parametrize("num_requests", [1, 8])
def test_slow_first_steps_decide_nothing(num_requests):
    """As on a machine that does something else while the engine starts."""
    choice = ShapeChoice()
    for _ in range(8):
        assert not choice.branches(num_requests)
        choice.observe(1.8, 2.0)
    branches, _ = run(choice, CHAIN, (2.4, 1.0), 300, num_requests)
    assert np.mean(branches[100:]) < 0.2


def test_the_first_step_may_compile_kernels():
    choice = ShapeChoice()
    while not choice.branches(1):
        choice.observe(*CHAIN)
    choice.observe(4, 500.0)
    branches, _ = run(choice, CHAIN, (4.2, 1.0), 400)
    assert np.mean(branches[100:]) > 0.8


def test_a_shape_that_is_never_measured_is_given_up():
    """As where every step also reads prompts."""
    choice, branches = ShapeChoice(), []
    for _ in range(400):
        branches.append(choice.branches(4))
        if not branches[-1]:
            choice.observe(*CHAIN)
    assert branches[:64] == ([False] * 8 + [True] * 8) * 4
    assert not any(branches[64:])


STATES = [RequestState(20, 4, 8, index) for index in range(2)]


class TestAdaptive:
    def policy(self):
        context = PolicyContext(8, fixed_latency(), drafts_trees=True)
        return create_policy("adaptive", context, {})

    def test_a_batch_with_several_policies_has_trees_if_one_wants_them(self):
        context = PolicyContext(8, fixed_latency(), drafts_trees=True)
        router = PolicyRouter(context, self.policy())
        router.default.shapes.branches = lambda num_requests: False
        assert not router.branches(STATES)
        states = [STATES[0], STATES[1]._replace(policy="eagle2")]
        assert router.branches(states)

    def test_requests_without_speculation_want_no_trees(self):
        context = PolicyContext(8, fixed_latency(), drafts_trees=True)
        router = PolicyRouter(context, self.policy())
        router.default.shapes.branches = lambda num_requests: False
        assert not router.branches([STATES[0], STATES[1]._replace(policy="none")])

    def test_a_step_that_only_reads_prompts_has_no_shape(self):
        policy = self.policy()
        for _ in range(50):
            assert not policy.branches([])

    def test_only_typical_steps_that_were_asked_about_count(self):
        policy = self.policy()
        seen = []
        policy.shapes.observe = lambda *measured: seen.append(measured)
        offers = [state._replace(offer=[0.5], has_model=False) for state in STATES]
        for is_asked, disturbed in ((True, True), (False, False), (True, False)):
            if is_asked:
                policy.branches(STATES)
            policy.looks_for_offers(STATES)
            policy.plan_drafts(offers)
            policy.observe(accepted(1, 0), times(disturbed))
        usual = fixed_latency().target_seconds(2, sum(state.num_tokens for state in STATES))
        assert seen == [(pytest.approx(1.5), pytest.approx(0.5 / usual))]

    @pytest.mark.parametrize("has_model", [True, False])
    def test_only_trees_without_a_model_rest(self, has_model):
        """With a model, steps without drafts are measured among those with chains."""
        policy = self.policy()
        policy.shapes.branches = lambda num_requests: True
        states = [state._replace(has_model=has_model) for state in STATES]
        looked = []
        for _ in range(200):
            policy.branches(states)
            looked.append(policy.looks_for_offers(states))
            if looked[-1]:
                policy.plan_drafts([each._replace(offer=[0.5], has_model=False) for each in states])
                policy.observe(accepted(1, 0), times(False))
            else:
                policy.skip_drafts(states)
                policy.observe(accepted(0, 0), times(False))
        assert all(looked) == has_model

    def test_offers_are_looked_for_where_nobody_asks(self):
        """As in a step with a draft model, after a step that looked for none."""
        policy = self.policy()
        offers = [state._replace(offer=[0.99] * 4, has_model=False) for state in STATES]
        while policy.looks_for_offers(STATES):
            policy.plan_drafts(offers)
        policy.skip_drafts(STATES)
        assert all(choice.length for choice in policy.plan_drafts(offers))


def accepted(*numbers):
    """The outcome of a step of trees."""
    zeros = torch.zeros(len(numbers), 1)
    return Outcome(
        *((1,) * len(numbers), (1,) * len(numbers), numbers, (0,) * len(numbers)),
        zeros,
        prefix_acceptance_prob=zeros,
        num_known=(0,) * len(numbers),
    )


def times(disturbed):
    return replace(NO_TIMES, verify=0.5, disturbed=disturbed)


def test_chains_are_measured_however_long_their_steps_say_nothing():
    """Steps that process prompts are not observed."""
    choice = ShapeChoice()
    assert not any(choice.branches(1) for _ in range(200))
    branches, _ = run(choice, (3.0, 0.5), TREE, 400)
    assert not any(branches[56:64])
    assert np.mean(branches[-100:]) < 0.2


def test_chains_are_measured_first():
    """Trees have their turn after them, so a short run drafts as without trees."""
    choice, branches = ShapeChoice(), []
    for _ in range(16):
        branches.append(choice.branches(2))
        choice.observe(*(TREE if branches[-1] else CHAIN))
    assert branches == [False] * 8 + [True] * 8
