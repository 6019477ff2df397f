"""Priced policies without models: what they draft, filter, cut, explore and learn."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftwise.core.goodput import StepEstimate
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import StepTimes
from draftwise.errors import InvalidParameterError
from draftwise.estimators.combined import Signals
from draftwise.policies import POLICIES, PolicyContext, create_policy
from draftwise.policies.pricing import Pricing
from draftwise.policies.pricing_options import PricingOptions
from draftwise.policies.registry import options_of

from ..stand_ins import FixedLatency, fixed_latency, profile
from .driving import (
    World,
    fix_price,
    make,
    one_second,
    outcome_of,
    signals_at,
    take_step,
)

NAMES = ("adaptive", "sv", "sv-predictable")
property_test = settings(deadline=None, derandomize=True, max_examples=40)
each_name = pytest.mark.parametrize("name", NAMES)
thresholds = st.sampled_from([0.0, 0.05, 0.2, 0.35, 0.5, 0.7, 0.9])


def p_of(model, world, row, place, token=None, history=0.5):
    """P of one token, by one model."""
    h, q, s, a = signals_at(world, row, place, token)
    columns = (np.array([value]) for value in (q, h, history, float(place), s, a))
    return float(model.predict(Signals(*columns))[0])


def learning_always(policy):
    """Make the policy use signals and learn in every step."""
    policy.options = replace(policy.options, learn_every=1, warm_up=0)
    return policy


class TestOptions:
    @each_name
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(("explore_every", value) for value in (1, 0, -3, 2.0, True, "64")),
            *(("learn_every", value) for value in (0, 1.5)),
            *(("warm_up", value) for value in (-1, True)),
            *(("review_every", value) for value in (0, "256")),
            ("trial_steps", 1),
            ("memory", 0),
            ("prior_steps", 0),
            ("num_thresholds", -1),
            *(("exploration_bonus", value) for value in (-0.1, 1.5, "much", float("nan"))),
            *(("acceptance_guess", value) for value in (0, 1, True)),
        ],
    )
    def test_invalid_values_are_refused(self, name, option, value):
        with pytest.raises(InvalidParameterError) as caught:
            make(name, 3, **{option: value})
        assert caught.value.field == f"policy_options.{option}"

    @each_name
    def test_every_option_is_listed_and_accepted(self, name):
        listed = options_of(POLICIES[name])
        assert listed == vars(PricingOptions())
        assert len(listed) <= 10
        policy = make(name, 3, learn_every=5, exploration_bonus=0, num_thresholds=0)
        assert policy.prices.options == PricingOptions(
            learn_every=5, exploration_bonus=0, num_thresholds=0
        )

    @each_name
    def test_models_start_from_the_profile(self, name):
        known = PolicyContext(3, fixed_latency(), profile(), has_companion=True)
        policy = create_policy(name, known, {})
        for greedy in (False, True):
            free = profile().parameters["free"]["weights"].numpy()
            assert np.array_equal(policy.models[greedy].weights, free)
        policy.models[False].weights += 1
        assert np.array_equal(policy.models[True].weights, free)
        assert np.array_equal(profile().parameters["free"]["weights"].numpy(), free)


@pytest.mark.slow
class TestLosslessness:
    """The proposal at a position depends on the tokens before it only."""

    @each_name
    @settings(property_test, max_examples=25)
    @given(
        st.integers(0, 10**6),
        thresholds,
        st.booleans(),
        st.sampled_from([2, 64]),
        st.integers(0, 2),
        st.integers(0, 2),
    )
    def test_the_drawn_token_does_not_change_the_proposal_at_its_position(
        self, name, seed, threshold, scores, explore_every, row, place
    ):
        world = World.random(4, 3, seed=seed, greedy=(3,))
        worlds = [world, *(world.diverging_at(row, place, x, seed + x) for x in range(8))]
        steps = []
        for each in worlds:
            policy = make(name, 3, explore_every=explore_every)
            fix_price(policy, threshold, verify=0.3)
            policy.draft_lengths(world.states())  # because the second step explores
            steps.append(take_step(policy, each, scores=scores))
        for request in range(4):
            for position in range(place + 1):
                is_open = {
                    step.draft.lengths[request] > position
                    and step.plan.lengths[request] >= position
                    for step in steps
                }
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
        policy = fix_price(make("sv-predictable", 3), threshold, None, 0.3)
        step = take_step(policy, world, scores=True)
        for row, length in enumerate(step.plan.lengths):
            assert torch.equal(step.plan.proposals[row, :length], step.q[row, :length])
            assert not step.plan.proposals[row, length:].any()

    @each_name
    def test_tokens_are_both_kept_and_dropped(self, name):
        """Policies that filter also drop a part of the vocabulary at some positions."""
        dropped = kept = partial = 0
        for seed in range(20):
            policy = fix_price(make(name, 3), 0.5)
            step = take_step(policy, World.random(6, 3, seed=seed), scores=True)
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
    @given(
        st.sampled_from(["adaptive", "sv"]),
        st.integers(0, 10**6),
        st.sampled_from([0.15, 0.3, 0.5, 0.7]),
    )
    def test_the_filter_applies_to_every_token_of_the_vocabulary(self, name, seed, threshold):
        """keep(x) = [w·P(x) ≥ c], with P computed for one token at a time."""
        world = World.random(3, 3, seed=seed, greedy=(1,))
        policy = fix_price(make(name, 3), threshold)
        step = take_step(policy, world, scores=True)
        models = policy.combined if name == "sv" else policy.models
        for row, (drafted, verified) in enumerate(
            zip(step.draft.lengths, step.plan.lengths, strict=True)
        ):
            model = models[world.greedy[row]]
            prefix_acceptance_prob = 1.0
            for place in range(min(drafted, verified + 1)):
                by_token = np.array([p_of(model, world, row, place, x) for x in range(8)])
                assume((np.abs(prefix_acceptance_prob * by_token - threshold) > 1e-4).all())
                limit = threshold / prefix_acceptance_prob
                assume(abs(limit - 0.12) > 1e-4)
                keep = torch.tensor((by_token >= limit) | (limit <= 0.12))
                expected = step.q[row, place] * keep
                assert torch.equal(step.plan.proposals[row, place], expected)
                drawn = world.tokens[row, place]
                assert (verified > place) == bool(keep[drawn])
                prefix_acceptance_prob *= by_token[drawn]

    def test_positions_with_a_low_threshold_are_not_filtered(self):
        world = World.random(6, 3, seed=1)
        step = take_step(fix_price(make("adaptive", 3), 0.01), world)
        before = torch.tensor(step.draft.lengths)
        assert step.plan.lengths == tuple(before.tolist())
        assert torch.equal(step.plan.proposals, step.q)

    @pytest.mark.parametrize("name", ["adaptive", "sv", "sv-predictable"])
    def test_greedy_requests_have_the_same_lengths_in_batches_without_proposals(self, name):
        for seed in range(10):
            world = World.random(5, 3, seed=seed, greedy=range(5))
            mixed = World(
                *(
                    torch.cat([ours, ours[:1]])
                    for ours in (world.q, world.c, world.p, world.tokens)
                ),
                (*world.greedy, False),
            )
            without = take_step(fix_price(make(name, 3), 0.5), world, scores=True)
            mixed_step = take_step(fix_price(make(name, 3), 0.5), mixed, scores=True)
            assert without.plan.proposals is None
            assert mixed_step.plan.lengths[:5] == without.plan.lengths

    @pytest.mark.parametrize("name", ["adaptive", "sv-predictable"])
    def test_drafts_of_a_fixed_length_are_verified_completely(self, name):
        world = World.random(6, 4, seed=2)
        policy = fix_price(make(name, 4), 0.0, max_length=2)
        step = take_step(policy, world, scores=False)
        assert step.plan.lengths == step.draft.lengths == (2,) * 6
        assert torch.equal(step.plan.proposals, step.q)

    def test_scored_drafts_of_a_fixed_length_are_filtered_by_the_price(self):
        world = World.random(8, 3, seed=3)
        policy = fix_price(make("sv", 3), 0.0, verify=0.6)
        step = take_step(policy, world, scores=True)
        assert sum(step.plan.lengths) < sum(step.draft.lengths) == 24


class TestDrafting:
    @property_test
    @given(st.integers(0, 10**6), thresholds)
    def test_drafting_stops_below_the_threshold(self, seed, threshold):
        assume(threshold > 0)
        world = World.random(4, 4, seed=seed, greedy=(0,))
        policy = fix_price(make("adaptive", 4), threshold)
        states = world.states(limits=[4, 3, 1, 0])
        step = take_step(policy, world, states)
        for row, length in enumerate(step.draft.lengths):
            prefix_acceptance_prob, expected = 1.0, 0
            while expected < states[row].draft_limit and prefix_acceptance_prob >= threshold:
                prefix_acceptance_prob *= p_of(
                    policy.models[world.greedy[row]], world, row, expected
                )
                assume(abs(prefix_acceptance_prob - threshold) > 1e-5)
                expected += 1
            assert length == expected

    def test_an_operating_point_without_drafting(self):
        policy = fix_price(make("adaptive", 4), 0.0, max_length=0)
        assert policy.draft_lengths(World.random(3, 4).states()) == [0, 0, 0]


class TestExploring:
    @each_name
    def test_turns_do_not_depend_on_drafts(self, name):
        turns = []
        for seed in (0, 1):
            policy = fix_price(make(name, 4, explore_every=5), 0.9, max_length=0)
            lengths = []
            for step in range(40):
                world = World.random(3, 4, seed=100 * seed + step)
                lengths.append(take_step(policy, world, world.states(limits=[4, 2, 4])).draft)
                policy.exploration.others_drafted()
            turns.append([draft.lengths for draft in lengths])
        assert turns[0] == turns[1]
        (first, *_, last) = [step for step, each in enumerate(turns[0], 1) if any(each)]
        assert (first, last) == (5, 40)
        explored = [each for each in turns[0] if any(each)]
        assert explored == [(0, 2, 0), (0, 0, 4), (4, 0, 0)] * 2 + [(0, 2, 0), (0, 0, 4)]

    @pytest.mark.parametrize(
        ("max_length", "explored"),
        [(0, [5, 15, 35, 75, 115, 155, 195]), (2, list(range(5, 200, 5)))],
    )
    def test_intervals_double_while_nothing_is_drafted(self, max_length, explored):
        policy = fix_price(make("adaptive", 4, explore_every=5), 0.0, max_length=max_length)
        found = []
        for step in range(1, 200):
            world = World.random(2, 4, seed=step)
            taken = take_step(policy, world)
            policy.observe(outcome_of(world, taken), one_second())
            if max(taken.draft.lengths) == 4:
                found.append(step)
        assert found == explored

    def test_drafts_of_small_batches_do_not_shorten_the_intervals_of_large_ones(self):
        policy = fix_price(make("adaptive", 4, explore_every=5), 0.0, max_length=0)
        found: dict[int, list[int]] = {2: [], 8: []}
        for step in range(1, 101):
            for size, explored in found.items():
                fix_price(policy, 0.0, max_length=0 if size == 8 else 2)
                world = World.random(size, 4, seed=10 * step + size)
                taken = take_step(policy, world)
                policy.observe(outcome_of(world, taken), one_second())
                if max(taken.draft.lengths) == 4:
                    explored.append(step)
        assert found == {2: list(range(5, 101, 5)), 8: [5, 15, 35, 75]}

    @pytest.mark.parametrize(
        ("passes", "limit", "length"),
        [(0.0, 16, 5), (2.1, 16, 5), (4.3, 16, 9), (20.0, 16, 16), (4.3, 7, 7)],
    )
    def test_an_explorer_drafts_twice_as_far_as_is_usual(self, monkeypatch, passes, limit, length):
        policy = fix_price(make("adaptive", 16, explore_every=2), 0.9, max_length=0)
        estimate = StepEstimate(2.0, 1.0, 3.0, passes)
        monkeypatch.setattr(Pricing, "estimate", property(lambda _: estimate))
        states = World.random(1, 16).states(limits=[limit])
        assert [policy.draft_lengths(states) for _ in range(2)] == [[0], [length]]

    def test_requests_that_cannot_draft_do_not_explore(self):
        policy = fix_price(make("adaptive", 4, explore_every=2), 0.9, max_length=0)
        states = World.random(3, 4).states(limits=[0, 4, 0])
        found = [policy.draft_lengths(states) for _ in range(6)]
        explored, nothing = [0, 4, 0], [0, 0, 0]
        assert found == [nothing, explored, nothing, nothing, nothing, explored]

    @each_name
    @pytest.mark.parametrize("scores", [True, False])
    def test_the_explorer_is_never_filtered(self, name, scores):
        filtered = 0
        for seed in range(10):
            policy = fix_price(make(name, 4, explore_every=2), 0.8)
            world = World.random(3, 4, seed=seed)
            policy.draft_lengths(world.states())
            step = take_step(policy, world, scores=scores)
            assert step.draft.lengths[1] == step.plan.lengths[1] == 4
            assert torch.equal(step.plan.proposals[1], step.q[1])
            filtered += sum(step.plan.lengths) - 4
        assert filtered < 40


@pytest.mark.slow
class TestLearning:
    def steps(self, policy, count, similarity=2.0, times=None):
        for seed in range(count):
            world = World.random(4, 3, seed=seed, similarity=similarity, greedy=(3,))
            step = take_step(policy, world)
            yield world, step
            policy.observe(outcome_of(world, step), times or one_second())

    @pytest.mark.slow
    @each_name
    @pytest.mark.parametrize("threshold", [0.0, 0.4])
    def test_estimates_follow_the_target(self, name, threshold):
        policy = learning_always(fix_price(make(name, 3), threshold, verify=0.3))
        policy.prices.companion_price = lambda *_: -1.0
        for _ in self.steps(policy, 1000, similarity=0.3):
            pass
        assert policy.calibration_error < 0.05
        worlds = [World.random(4, 1, seed=10_000 + seed, similarity=0.3) for seed in range(60)]
        pairs = [
            (p_of(policy.models[False], world, row, 0), min(1.0, float(p / q)))
            for world in worlds
            for row in range(4)
            for x in [world.tokens[row, 0]]
            for p, q in [(world.p[row, 0, x], world.q[row, 0, x])]
        ]
        predicted, happened = np.array(pairs).T
        assert predicted.mean() == pytest.approx(happened.mean(), abs=0.06)

    def test_greedy_and_sampled_requests_have_separate_models(self):
        policy = learning_always(fix_price(make("adaptive", 3), 0.0))
        before = {greedy: model.weights.copy() for greedy, model in policy.models.items()}
        world = World.random(2, 3, seed=0)
        policy.observe(outcome_of(world, take_step(policy, world)), one_second())
        assert np.array_equal(policy.models[True].weights, before[True])
        assert not np.array_equal(policy.models[False].weights, before[False])

    @each_name
    @pytest.mark.parametrize("scores", [True, False])
    @pytest.mark.parametrize("most_known", [3, 1])
    def test_recorded_drafts_have_known_acceptance_or_the_estimate(self, name, scores, most_known):
        """Known acceptance is that of the target. Other tokens get the acceptance estimate."""
        policy = learning_always(fix_price(make(name, 3), 0.4))
        recorded = []
        policy.prices.drafts.observe = lambda *each: recorded.append(each)
        world = World.random(4, 3, seed=1, greedy=(3,))
        step = take_step(policy, world, scores=scores)
        assert max(step.plan.lengths) > 1
        lengths_known = tuple(min(length, most_known) for length in step.plan.lengths)
        outcome = replace(outcome_of(world, step), num_known=lengths_known)
        free = [
            [p_of(policy.models[row == 3], world, row, place) for place in range(drafted)]
            for row, drafted in enumerate(step.draft.lengths)
        ]
        policy.observe(outcome, one_second())
        ((expected, acceptance, lengths),) = recorded
        assert lengths.tolist() == list(step.draft.lengths)
        for row, (known, drafted) in enumerate(zip(lengths_known, step.draft.lengths, strict=True)):
            assert expected[row, :drafted] == pytest.approx(free[row], abs=1e-3)
            prefix_acceptance_prob = outcome.prefix_acceptance_prob[row, :known].tolist()
            assert np.cumprod(acceptance[row, :known]) == pytest.approx(prefix_acceptance_prob)
            estimate = policy.acceptance_estimate[row, known:drafted]
            assert acceptance[row, known:drafted] == pytest.approx(estimate)

    @pytest.mark.parametrize(
        "times",
        [replace(one_second(), num_prompt_tokens=3), replace(one_second(), disturbed=True)],
        ids=["prompts", "shared"],
    )
    def test_steps_with_prompts_or_other_policies_do_not_change_prices(self, times):
        policy = fix_price(make("adaptive", 3), 0.4)
        policy.prices.observe = None
        learning_always(policy)
        before = policy.models[False].weights.copy()
        for _ in self.steps(policy, 5, times=times):
            pass
        assert not np.array_equal(policy.models[False].weights, before)

    @pytest.mark.parametrize(("threshold", "counted"), [(0.0, 10), (0.3, 15)])
    def test_prices_ignore_steps_that_do_extra_work_to_learn(self, threshold, counted):
        """Such steps explore, or compute signals only to learn."""
        policy = fix_price(make("adaptive", 3, explore_every=4), threshold)
        policy.options = replace(policy.options, learn_every=2)
        seen = []
        policy.prices.observe = lambda seconds, *_: seen.append(seconds)
        world = World.random(2, 3)
        for _ in range(20):
            policy.observe(outcome_of(world, take_step(policy, world)), one_second())
        assert len(seen) == counted

    def test_step_times_exclude_the_companions_time(self):
        policy = fix_price(make("sv", 3), 0.4)
        seen = []
        policy.prices.observe = lambda seconds, *_: seen.append(seconds)
        world = World.random(2, 3)
        step = take_step(policy, world, scores=True)
        policy.observe(outcome_of(world, step), replace(one_second(), companion=0.5))
        assert seen == [pytest.approx(one_second().total)]

    def test_steps_without_a_price_are_ignored(self):
        policy = fix_price(make("adaptive", 3), 0.4)
        seen = []
        policy.prices.observe = lambda *each: seen.append(each)
        world = World.random(2, 3)
        for limits, priced in (([3, 3], 1), ([0, 0], 1), ([0, 1], 2)):
            step = take_step(policy, world, world.states(limits=limits))
            policy.observe(outcome_of(world, step), one_second())
            assert len(seen) == priced

    @each_name
    def test_failed_requests_are_ignored(self, name):
        alone, with_failed = (
            learning_always(fix_price(make(name, 3), 0.0, verify=0.01)) for _ in range(2)
        )
        gained = []
        for policy in (alone, with_failed):
            policy.prices.drafts.observe = lambda *each: gained.append(each)
        world = World.random(3, 3, seed=1)
        part = World(
            *(each[:2] for each in (world.q, world.c, world.p, world.tokens)), (False, False)
        )
        for policy, each, failed in ((alone, part, ()), (with_failed, world, (2,))):
            step = take_step(policy, each, scores=True)
            policy.observe(outcome_of(each, step, failed), one_second())
        for one, other in zip(*gained, strict=True):
            assert np.asarray(one)[:2] == pytest.approx(np.asarray(other)[:2])
        assert gained[1][2].tolist() == [3, 3, 0]
        assert with_failed.models[False].weights == pytest.approx(alone.models[False].weights)

    @pytest.mark.parametrize("threshold", [0.0, 0.3])
    def test_signals_are_used_with_a_threshold_and_in_steps_to_learn_from(self, threshold):
        policy = fix_price(make("adaptive", 3, explore_every=1000), threshold)
        weights, used = [policy.models[False].weights.copy()], []
        for _ in self.steps(policy, 164):
            used.append(policy.uses_draft_signals())
            weights.append(policy.models[False].weights.copy())
        learning = [step % (2 if step <= 64 else 8) == 0 for step in range(1, 165)]
        assert used == ([True] * 164 if threshold else learning)
        learnt = [not np.array_equal(*pair) for pair in itertools.pairwise(weights)]
        # The generator yields a step before the policy learns from it.
        assert learnt == [False, *learning[:-1]]


class TestPricesOfAStep:
    """Tokens drawn in a step do not change its prices."""

    @each_name
    def test_prices_are_fixed_before_drafting(self, name):
        expensive = FixedLatency(
            StageCost((1, 2, 4096), (0.010, 0.011, 4.1)),
            StageCost((1, 4096), (0.0005, 0.001)),
            StageCost((1, 4096), (0.0005, 0.001)),
        )
        policies = [make(name, 3, expensive) for _ in range(2)]
        for seed in range(30):
            worlds = World.random(4, 3, seed=seed), World.random(4, 3, seed=seed + 1000)
            steps = [
                take_step(policy, world) for policy, world in zip(policies, worlds, strict=True)
            ]
            assert policies[0]._price == policies[1]._price
            assert policies[0]._max_lengths == policies[1]._max_lengths
            assert (steps[0].companion_scores is None) == (steps[1].companion_scores is None)
            # Both policies learn from the same step.
            for policy in policies:
                step = take_step(policy, worlds[0])
                policy.observe(outcome_of(worlds[0], step), StepTimes(0.01, 0, 0, 0.02, 0, 0))


class TestSources:
    """Offers for some requests of a batch, and a draft model for the others."""

    TARGET = StageCost((1, 4096), (0.010, 0.0101))
    EXPENSIVE = StageCost((1, 4096), (0.020, 0.020))

    def shares(self, policy, pass_seconds, steps=600):
        """In each step, the share of the requests for which the model drafts.

        Args:
            policy: the policy.
            pass_seconds: how long a pass of the model takes, whatever the cost model says.
        """
        random, shares = np.random.default_rng(0), []
        for number in range(steps):
            world = World.random(8, 3, seed=number, similarity=8.0)
            offered = random.permutation(8)[:3]
            states = [
                state._replace(offer=(0.5, 0.5) if row in offered else ())
                for row, state in enumerate(world.states(history=0.9))
            ]
            if policy.adds_offers(states):
                choices = policy.plan_drafts(states)
                limits = [0 if choice.uses_offer else choice.length for choice in choices]
                policy.looked_for_offers(0.0)
            else:
                limits = policy.draft_lengths(states)
            step = take_step(policy, world, states, limits=limits)
            seconds = pass_seconds * max(step.draft.lengths)
            verify = self.TARGET(8 + sum(step.plan.lengths))
            times = StepTimes(seconds, 0.0, 0.0, verify, 0.0, 0.0)
            policy.observe(outcome_of(world, step), times)
            shares.append(float(np.mean(np.array(step.draft.lengths) > 0)))
        return shares

    def policy(self):
        latency = FixedLatency(self.TARGET, self.EXPENSIVE)
        return create_policy("adaptive", PolicyContext(3, latency), {"warm_up": 0})

    def test_a_model_that_is_cheaper_than_estimated_is_found(self):
        shares = self.shares(self.policy(), 0.0003)
        assert max(shares[:20]) < 0.2
        assert np.mean(shares[-100:]) > 0.6

    def test_a_model_that_is_as_expensive_as_estimated_is_hardly_tried(self):
        shares = self.shares(self.policy(), 0.020)
        assert np.mean(shares) < 0.1


class TestSteadyRests:
    """Where nothing is drafted, only some steps are learnt from, because learning takes time."""

    def test_one_step_in_four_is_learnt_from_after_the_first_ones(self, monkeypatch):
        policy = fix_price(make("adaptive", 4, warm_up=8, explore_every=1000), 0.0, max_length=0)
        learnt = []
        monkeypatch.setattr(policy.prices, "observe", lambda *_: learnt.append(step))
        for step in range(1, 25):
            world = World.random(2, 4, seed=step)
            policy.observe(outcome_of(world, take_step(policy, world)), one_second())
        assert learnt == [*range(1, 9), 12, 16, 20, 24]

    def test_steps_that_draft_are_always_learnt_from(self, monkeypatch):
        policy = fix_price(make("adaptive", 4, warm_up=0, explore_every=1000), 0.0, max_length=2)
        learnt = []
        monkeypatch.setattr(policy.prices, "observe", lambda *_: learnt.append(step))
        for step in range(1, 13):
            fix_price(policy, 0.0, max_length=2 if step in (5, 10) else 0)
            world = World.random(2, 4, seed=step)
            policy.observe(outcome_of(world, take_step(policy, world)), one_second())
        assert learnt == [1, 2, 4, 5, 6, 7, 9, 10, 11, 12]

    def test_steps_that_read_prompts_do_not_take_the_place_of_others(self, monkeypatch):
        policy = fix_price(make("adaptive", 4, warm_up=0, explore_every=1000), 0.0, max_length=0)
        learnt, counted = [], []
        monkeypatch.setattr(policy.prices, "observe", lambda *_: learnt.append(step))
        monkeypatch.setattr(policy.prices, "count_step", counted.append)
        for step in range(1, 25):
            times = replace(one_second(), num_prompt_tokens=0 if step % 4 else 9)
            world = World.random(2, 4, seed=step)
            policy.observe(outcome_of(world, take_step(policy, world)), times)
        assert learnt == [1, 2, 5, 10, 15, 21]
        assert counted == [step % 4 > 0 for step in range(1, 25)]

    def test_all_steps_of_a_trial_are_learnt_from(self, monkeypatch):
        policy = fix_price(make("adaptive", 4, warm_up=0, explore_every=1000), 0.0, max_length=0)
        monkeypatch.setattr(Pricing, "in_trial", property(lambda _: 10 <= step < 20))
        learnt = []
        monkeypatch.setattr(policy.prices, "observe", lambda *_: learnt.append(step))
        for step in range(1, 31):
            world = World.random(2, 4, seed=step)
            policy.observe(outcome_of(world, take_step(policy, world)), one_second())
        assert learnt == [1, 2, 4, 8, *range(10, 20), 22, 26, 30]
