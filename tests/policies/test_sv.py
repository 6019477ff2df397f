"""When the companion scores drafts, and the published rule, which scores every draft."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import StepTimes
from draftwise.estimators.combined import Signals
from draftwise.estimators.profile import fit_profile
from draftwise.estimators.tables import AcceptanceTable
from draftwise.policies import PolicyContext, create_policy
from draftwise.policies.router import PolicyRouter

from ..stand_ins import FixedLatency, fixed_latency, profile, random_records
from .driving import (
    World,
    fix_choice,
    lengths_of,
    make,
    one_second,
    outcome_of,
    signals_at,
    take_step,
)

each_form = pytest.mark.parametrize("name", ["sv", "sv-predictable"])


thresholds = st.sampled_from([0.1, 0.3, 0.5, 0.7])
property_test = settings(deadline=None, derandomize=True, max_examples=40)


def scored_share(policy, num_steps, overlap, companion=0.0005, size=8):
    """Share of the last half of the steps that the companion scored.

    Args:
        policy: the policy.
        num_steps: number of steps.
        overlap: whether the companion's distributions are the target's, so that they tell which
            tokens are accepted. Otherwise they tell nothing.
        companion: seconds of a pass of the companion.
        size: number of requests.
    """
    costs = LatencyModel(
        StageCost((1, 256), (0.010, 0.150)),
        StageCost((1, 256), (0.0002, 0.0003)),
        StageCost((1, 256), (companion, companion)),
    )
    context = PolicyContext(3, costs, None, has_companion=True)
    made = create_policy(policy, context, {})
    router = PolicyRouter(context, made)
    scored = []
    for number in range(num_steps):
        world = World.random(size, 3, vocab=4, seed=number, similarity=0.3)
        world = replace(world, c=world.p if overlap else world.q)
        step = take_step(router, world)
        scored.append(step.companion_scores is not None)
        drafted = step.draft.lengths
        passes = [sum(n > place for n in drafted) for place in range(max(drafted, default=0))]
        times = StepTimes(
            sum(map(costs.draft, passes)),
            companion if scored[-1] else 0.0,
            0.0,
            costs.target(size + sum(step.plan.lengths)),
            0.0,
            0.0,
        )
        router.observe(outcome_of(world, step), times)
    return sum(scored[num_steps // 2 :]) / (num_steps - num_steps // 2)


@pytest.mark.slow
class TestScoring:
    def test_a_companion_that_tells_much_is_used(self):
        assert scored_share("sv", 400, overlap=True) > 0.5

    def test_a_companion_that_tells_nothing_is_hardly_used(self):
        assert scored_share("sv", 400, overlap=False, companion=0.002) < 0.1

    def test_a_companion_that_takes_longer_than_a_step_is_hardly_used(self):
        assert scored_share("sv", 400, overlap=True, companion=0.02) < 0.1


@each_form
def test_nothing_is_scored_without_a_companion(name):
    policy = make(name, 3, has_companion=False)
    for seed in range(10):
        step = take_step(policy, World.random(4, 3, seed=seed))
        assert step.companion_scores is None


@each_form
def test_the_estimate_learns_from_scored_steps_only(name):
    for scored in (False, True):
        policy = fix_choice(make(name, 3), 3, scored=scored, price=0.3)
        before = policy.combined[False].weights.copy()
        world = World.random(4, 3, seed=7)
        step = take_step(policy, world)
        policy.observe(outcome_of(world, step), one_second())
        assert np.array_equal(policy.combined[False].weights, before) == (not scored)


@each_form
def test_copied_tokens_are_verified_whatever_the_companion_says(name):
    policy = fix_choice(make(name, 3), 3, scored=True, price=0.999)
    world = World.random(4, 3, seed=1)
    lengths_of(policy, world.states())
    by_model = np.array([False, False, True, True])
    policy._choice = policy._choice._replace(by_model=by_model)
    step = take_step(policy, world, scores=True, limits=[3, 2, 3, 3])
    assert step.plan.lengths[:2] == (3, 2)
    assert max(step.plan.lengths[2:]) == 0


class TestLosslessness:
    """The proposal at a position depends on the tokens before it only."""

    @each_form
    @settings(property_test, max_examples=25)
    @given(st.integers(0, 10**6), thresholds, st.integers(0, 2), st.integers(0, 2))
    def test_the_drawn_token_does_not_change_the_proposal_at_its_position(
        self, name, seed, threshold, row, place
    ):
        world = World.random(4, 3, seed=seed, greedy=(3,))
        worlds = [world, *(world.diverging_at(row, place, x, seed + x) for x in range(8))]
        steps = []
        for each in worlds:
            policy = fix_choice(make(name, 3), 3, scored=True, price=threshold)
            steps.append(take_step(policy, each))
        for request in range(4):
            for position in range(place + 1):
                is_open = {step.plan.lengths[request] >= position for step in steps}
                assert len(is_open) == 1
                if not is_open.pop():
                    continue
                proposal = steps[0].plan.proposals[request, position]
                assert bool((proposal <= steps[0].q[request, position]).all())
                for step, each in zip(steps, worlds, strict=True):
                    assert torch.equal(step.plan.proposals[request, position], proposal)
                    drawn = each.tokens[request, position]
                    kept = step.plan.lengths[request] > position
                    assert kept == bool(proposal[drawn] > 0)

    @property_test
    @given(st.integers(0, 10**6), thresholds)
    def test_predictable_cuts_need_no_filter(self, seed, threshold):
        world = World.random(4, 3, seed=seed, greedy=(1,))
        policy = fix_choice(make("sv-predictable", 3), 3, scored=True, price=threshold)
        step = take_step(policy, world)
        for row, length in enumerate(step.plan.lengths):
            assert torch.equal(step.plan.proposals[row, :length], step.q[row, :length])
            assert not step.plan.proposals[row, length:].any()

    @each_form
    def test_tokens_are_both_kept_and_dropped(self, name):
        """Policies that filter also drop a part of the vocabulary at some positions."""
        dropped = kept = partial = 0
        for seed in range(20):
            policy = fix_choice(make(name, 3), 3, scored=True, price=0.5)
            step = take_step(policy, World.random(6, 3, seed=seed))
            kept += sum(step.plan.lengths)
            dropped += sum(step.draft.lengths) - sum(step.plan.lengths)
            q, proposals = step.q[:, : step.plan.tokens.shape[1]], step.plan.proposals
            some, all_ = ((each > 0).sum(2) for each in (proposals[:, : q.shape[1]], q))
            partial += int(((some > 0) & (some < all_)).sum())
        assert kept > 20
        assert dropped > 20
        assert (partial == 0) == (name == "sv-predictable")


class TestFiltering:
    @property_test
    @given(st.integers(0, 10**6), st.sampled_from([0.15, 0.3, 0.5, 0.7]))
    def test_the_filter_applies_to_every_token_of_the_vocabulary(self, seed, threshold):
        """keep(x) = [w·P(x) ≥ c], with P computed for one token at a time."""
        world = World.random(3, 3, seed=seed, greedy=(1,))
        policy = fix_choice(make("sv", 3), 3, scored=True, price=threshold)
        step = take_step(policy, world)
        for row, (drafted, verified) in enumerate(
            zip(step.draft.lengths, step.plan.lengths, strict=True)
        ):
            model = policy.combined[world.greedy[row]]
            reach = 1.0
            for place in range(min(drafted, verified + 1)):
                by_token = np.array([p_of(model, world, row, place, x) for x in range(8)])
                assume((np.abs(reach * by_token - threshold) > 1e-4).all())
                limit = threshold / reach
                assume(abs(limit - 0.12) > 1e-4)
                keep = torch.tensor((by_token >= limit) | (limit <= 0.12))
                expected = step.q[row, place] * keep
                assert torch.equal(step.plan.proposals[row, place], expected)
                drawn = world.tokens[row, place]
                assert (verified > place) == bool(keep[drawn])
                reach *= by_token[drawn]

    @each_form
    def test_greedy_requests_have_the_same_lengths_in_batches_without_proposals(self, name):
        for seed in range(10):
            world = World.random(5, 3, seed=seed, greedy=range(5))
            parts = (torch.cat([w, w[:1]]) for w in (world.q, world.c, world.p, world.tokens))
            mixed = World(*parts, (*world.greedy, False))
            steps = [
                take_step(fix_choice(make(name, 3), 3, scored=True, price=0.5), each)
                for each in (world, mixed)
            ]
            assert steps[0].plan.proposals is None
            assert steps[1].plan.lengths[:5] == steps[0].plan.lengths


def test_dropped_tokens_do_not_bias_the_survival():
    """The companion drops what would be rejected. Survival stays that of all drafted tokens."""
    policy = fix_choice(make("sv", 3), 3, scored=True, price=0.4)
    plain = fix_choice(make("adaptive", 3), 3)
    for seed in range(300):
        world = World.random(8, 3, seed=seed)
        for each in (policy, plain):
            step = take_step(each, world)
            each.observe(outcome_of(world, step), one_second())
    assert policy.survival() == pytest.approx(plain.survival(), abs=0.05)


def p_of(model, world, row, place, token):
    """The model's estimate for one token."""
    entropy, prob, overlap, agreement = signals_at(world, row, place, token)
    values = (prob, entropy, 0.5, float(place), overlap, agreement)
    return float(model.predict(Signals(*(np.array([each]) for each in values)))[0])


class TestPublished:
    def policy(self, known=None, latency=None, gamma=3):
        context = PolicyContext(gamma, latency or fixed_latency(), known, has_companion=True)
        return create_policy("sv-published", context, {})

    def test_engines_that_share_a_profile_have_separate_tables(self):
        first, second = self.policy(profile()), self.policy(profile())
        known = profile().tables["adaptive"]
        for seed in range(60):
            world = World.random(8, 3, seed=seed)
            first.observe(outcome_of(world, take_step(first, world)), one_second())
        assert not torch.equal(first.table.values, known.values)
        assert torch.equal(second.table.values, known.values)
        fresh = AcceptanceTable.from_tensors(known.to_tensors())
        assert torch.equal(fresh.values, known.values)

    def test_a_profile_without_tables_gives_the_prior(self):
        provenance = {"target": "a", "draft": "b"}
        known = fit_profile(random_records(50), provenance)
        assert not known.tables
        policy = self.policy(known)
        assert torch.equal(policy.table.values, AcceptanceTable.prior().values)
        take_step(policy, World.random(2, 3))

    @settings(deadline=None, derandomize=True, max_examples=40)
    @given(st.integers(0, 10**6), st.floats(0.0, 0.01), st.floats(0.0, 0.01))
    def test_selected_lengths_have_the_largest_goodput(self, seed, per_token, per_stair):
        """Compared with all other combinations of lengths."""

        def seconds(tokens):
            return 0.01 + per_token * tokens + per_stair * (tokens // 4)

        sizes = tuple(range(1, 20))
        latency = FixedLatency(StageCost(sizes, tuple(seconds(size) for size in sizes)))
        policy = self.policy(latency=latency)
        world = World.random(3, 3, seed=seed)
        step = take_step(policy, world, world.states(limits=[3, 1, 2]))
        accepted = policy.table.predict(
            step.companion_scores.overlap, step.companion_scores.agreement
        )

        def goodput(lengths):
            prefix_acceptance_prob = [
                accepted[row, :n].cumprod(0).sum() for row, n in enumerate(lengths)
            ]
            return (3 + float(sum(prefix_acceptance_prob))) / seconds(3 + sum(lengths))

        best = max(map(goodput, itertools.product(range(4), range(2), range(3))))
        assert goodput(step.plan.lengths) == pytest.approx(best, rel=1e-5)
        for row, length in enumerate(step.plan.lengths):
            assert not step.plan.proposals[row, length:].any()

    def test_a_step_without_drafts_verifies_nothing(self):
        policy = self.policy()
        world = World.random(2, 3)
        step = take_step(policy, world, world.states(limits=[0, 0]))
        assert step.plan.lengths == (0, 0)
        policy.observe(outcome_of(world, step), one_second())
