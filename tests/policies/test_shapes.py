"""The choice between chains and trees follows their measured goodput."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwise.core.types import Outcome
from draftwise.policies import create_policy
from draftwise.policies.base import PolicyContext, RequestState
from draftwise.policies.router import PolicyRouter
from draftwise.policies.shapes import ShapeChoice

from ..stand_ins import NO_TIMES, fixed_latency

CHAIN, TREE = (3.0, 0.010), (4.2, 0.015)  # tokens and seconds of a step


def run(choice, chain, tree, num_steps, num_requests=1, seed=0):
    """Run steps with given means, and return which had trees and the achieved goodput."""
    random = np.random.default_rng(seed)
    branches, tokens, seconds = [], 0.0, 0.0
    for _ in range(num_steps):
        branches.append(choice.branches(num_requests))
        mean, duration = tree if branches[-1] else chain
        gained = sum(1 + random.binomial(8, (mean - 1) / 8) for _ in range(num_requests))
        took = duration * random.lognormal(0.0, 0.05)
        choice.observe(gained, took)
        tokens, seconds = tokens + gained, seconds + took
    return branches, tokens / seconds


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("factor", [0.5, 0.8, 0.93, 1.0, 1.07, 1.25, 2.0])
def test_little_is_lost_to_the_better_shape(factor, num_requests):
    tree = (TREE[0], TREE[0] / (factor * CHAIN[0] / CHAIN[1]))
    best = num_requests * max(CHAIN[0] / CHAIN[1], tree[0] / tree[1])
    goodputs = [
        run(ShapeChoice(), CHAIN, tree, 3000, num_requests, seed)[1] / best for seed in range(5)
    ]
    assert np.mean(goodputs) > 0.975


def test_the_worse_shape_is_rarely_used():
    for tree, share in (((4.2, 0.030), (0.0, 0.05)), ((4.2, 0.007), (0.95, 1.0))):
        branches, _ = run(ShapeChoice(), CHAIN, tree, 2000)
        assert share[0] <= np.mean(branches[200:]) <= share[1]


def test_a_change_of_the_workload_is_followed():
    choice = ShapeChoice()
    run(choice, CHAIN, (4.2, 0.020), 1500)
    branches, _ = run(choice, CHAIN, (4.2, 0.0105), 2500)
    assert np.mean(branches[-1000:]) > 0.8


def test_shapes_take_turns_of_several_steps():
    branches, _ = run(ShapeChoice(), CHAIN, TREE, 400)
    changes = np.flatnonzero(np.diff(branches)) + 1
    assert len(changes) > 1
    assert all(change % 8 == 0 for change in changes)


def test_another_batch_size_begins_with_what_is_known():
    choice = ShapeChoice()
    run(choice, CHAIN, (4.2, 0.030), 400, num_requests=4)
    branches, _ = run(choice, CHAIN, (4.2, 0.030), 100, num_requests=16)
    assert np.mean(branches) < 0.1


def test_a_pause_of_the_machine_decides_nothing():
    choice = ShapeChoice()
    run(choice, CHAIN, (4.2, 0.011), 400)
    while not choice.branches(1):
        choice.observe(3, 0.010)
    choice.observe(4, 60.0)
    branches, _ = run(choice, CHAIN, (4.2, 0.011), 400)
    assert np.mean(branches) > 0.7


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

    def test_only_typical_steps_count(self):
        policy = self.policy()
        seen = []
        policy.shapes.observe = lambda tokens, seconds: seen.append((tokens, seconds))
        for disturbed in (True, False):
            policy.branches(STATES)
            policy.looks_for_offers(STATES)
            policy.plan_drafts([s._replace(offer=[0.5], has_model=False) for s in STATES])
            policy.observe(accepted(1, 0), times(disturbed))
        assert seen == [(3, 0.5)]


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
