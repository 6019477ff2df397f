"""When the companion scores drafts, and the published rule, which scores every draft."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.stage_cost import StageCost
from draftwise.estimators.fits import estimator_fits
from draftwise.estimators.profile import fit_profile
from draftwise.estimators.tables import AcceptanceTable
from draftwise.policies import PolicyContext, create_policy
from draftwise.policies.pricing import Pricing

from ..stand_ins import FixedLatency, fixed_latency, profile, random_records
from .driving import World, fix_price, make, one_second, outcome_of, take_step

each_form = pytest.mark.parametrize("name", ["sv", "sv-predictable"])


def scored_steps(policy, num_steps, companion_price, num_requests=4):
    """Numbers of the steps, from 1, that the companion scores."""
    policy.prices.companion_price = companion_price
    scored = []
    for number in range(1, num_steps + 1):
        world = World.random(num_requests, 3, seed=number)
        step = take_step(policy, world)
        if step.companion_scores is not None:
            scored.append(number)
        policy.observe(outcome_of(world, step), one_second())
    return scored


@pytest.mark.slow
@each_form
class TestScoring:
    def test_all_steps_except_a_few_while_the_net_gain_is_positive(self, name):
        """The other steps show how much time the companion adds."""
        policy = fix_price(make(name, 3), 0.5)
        assert scored_steps(policy, 60, lambda *_: 0.0) == [
            n for n in range(1, 61) if (n - 6) % 8 or n <= 6
        ]

    def test_initial_trials_then_single_trials_after_pauses_that_double(self, name):
        policy = fix_price(make(name, 3), 0.5)
        scored = scored_steps(policy, 1020, lambda *_: 50.0)
        assert scored[:6] == [1, 2, 3, 4, 5, 6]
        pauses = [after - before - 1 for before, after in itertools.pairwise(scored[5:])]
        assert pauses == [16, 32, 64, 128, 256, 512]

    def test_scoring_resumes_when_the_net_gain_is_positive_again(self, name):
        policy = fix_price(make(name, 3), 0.5)
        scored_steps(policy, 60, lambda *_: 0.5)
        scored = scored_steps(policy, 600, lambda *_: -5.0)
        assert len([n for n in scored if n > 500]) >= 87

    def test_the_price_is_that_of_the_drafted_tokens(self, name):
        policy = fix_price(make(name, 3), 0.5)
        sizes = []
        policy.prices.companion_price = lambda price, num_tokens: sizes.append(num_tokens) or 0.0
        step = take_step(policy, World.random(4, 3, seed=1))
        assert sizes == [sum(step.draft.lengths)]

    def test_each_batch_size_has_its_own_net_gain(self, name):
        policy = fix_price(make(name, 3), 0.5)
        scored_steps(policy, 20, lambda *_: 50.0, num_requests=4)
        assert scored_steps(policy, 10, lambda *_: 0.0, num_requests=16) == list(range(1, 11))
        assert scored_steps(policy, 2, lambda *_: 0.0, num_requests=4) == []

    def test_steps_without_drafts_are_not_scored(self, name):
        policy = fix_price(make(name, 3), 0.0, max_length=0)
        assert scored_steps(policy, 20, lambda *_: 50.0) == []
        # Those steps do not count as trials.
        fix_price(policy, 0.5)
        assert scored_steps(policy, 6, lambda *_: 50.0) == list(range(1, 7))

    def test_nothing_is_scored_without_a_companion(self, name):
        policy = fix_price(make(name, 3, has_companion=False), 0.5)
        assert scored_steps(policy, 10, lambda *_: 0.0) == []

    def test_the_combined_model_learns_from_scored_steps_only(self, name):
        policy = fix_price(make(name, 3, learn_every=1, warm_up=0), 0.3)
        models = {"free": policy.models[False], "all": policy.combined[False]}
        for scores, learning in ((False, ["free"]), (True, ["free", "all"])):
            before = {key: model.weights.copy() for key, model in models.items()}
            world = World.random(4, 3, seed=7)
            step = take_step(policy, world, scores=scores)
            policy.observe(outcome_of(world, step), one_second())
            changed = [k for k, m in models.items() if not np.array_equal(m.weights, before[k])]
            assert changed == learning

    @pytest.mark.parametrize("slower", [0.8, 1.5])
    def test_observed_step_times_replace_the_computed_cost(self, name, slower, monkeypatch):
        """The computed cost is 0. Observed steps with the companion are slower or faster."""
        policy = fix_price(make(name, 3), 0.5)
        price = replace(policy.prices.price(4, 100), goodput=12.0)
        policy.prices.price = lambda *_: price
        monkeypatch.setattr(Pricing, "expected_seconds", 1.0)
        policy.prices.observe = lambda *_: None
        policy.prices.companion_price = lambda *_: 0.0
        scored = []
        for number in range(400):
            world = World.random(4, 3, seed=number)
            step = take_step(policy, world)
            scored.append(step.companion_scores is not None)
            times = replace(one_second(), verify=0.75 * (slower if scored[-1] else 1.0))
            policy.observe(outcome_of(world, step), times)
        if slower > 1:
            assert sum(scored[200:]) < 20
        else:
            assert sum(scored[200:]) > 160


@each_form
def test_offered_tokens_are_verified_whatever_the_companion_says(name):
    policy = fix_price(make(name, 3), 0.999)
    world = World.random(4, 3, seed=1)
    states = [
        state._replace(offer=(0.9,) * 3 if row < 2 else ())
        for row, state in enumerate(world.states())
    ]
    policy.offers.select = lambda *_: np.array([3, 2, 0, 0])
    policy.sources.choose = lambda *_: (np.array([False, False, True, True]), 0.0)
    choices = policy.plan_drafts(states)
    assert [choice.uses_offer for choice in choices] == [True, True, False, False]
    step = take_step(policy, world, states, scores=True, limits=[c.length for c in choices])
    assert step.plan.lengths[:2] == (3, 2)
    assert max(step.plan.lengths[2:]) == 0


def test_net_gain_is_the_change_of_the_selection_minus_the_cost():
    """If both estimates agree, the gain is 0 and the pass still costs its price."""
    policy = fix_price(make("sv", 3), 0.5)
    gains = []
    world = World.random(4, 3, seed=1)
    policy.draft_lengths(world.states())
    policy._companion_value(len(policy._requests)).observe = gains.append
    policy.prices.companion_price = lambda *_: 0.25
    step = take_step(policy, world, scores=True)
    policy._update_companion_value(step.draft, policy._expected[:, : step.draft.tokens.shape[1]])
    assert gains[-1] == pytest.approx(-0.25)
    # The draft's own signals select tokens 1, 2 and 4. The companion's scores drop token 2 and add
    # token 3.
    policy._expected = np.array([[0.9], [0.9], [0.3], [0.9]])
    scored = np.array([[0.9], [0.2], [0.8], [0.7]])
    draft = take_step(fix_price(make("sv", 1), 0.5), World.random(4, 1)).draft
    policy._update_companion_value(draft, scored)
    assert gains[-1] == pytest.approx((0.5 - 0.2) + (0.8 - 0.5) - 0.25)


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
        assert known.calibration_error == 0

    def test_a_profile_without_tables_gives_the_prior(self):
        provenance = {"target": "a", "draft": "b"}
        known = fit_profile(random_records(50), provenance, estimator_fits(has_companion=False))
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
