"""Continuations beside a draft model are looked for where that saves more than it costs."""

import numpy as np
import pytest
import torch

from draftwise.core.stage_cost import StageCost
from draftwise.core.types import Outcome, StepTimes
from draftwise.policies import create_policy
from draftwise.policies.base import PolicyContext
from draftwise.policies.inputs import RequestState
from draftwise.policies.looking import LookingValue

from ..stand_ins import FixedLatency, fixed_latency


def share_of_looks(value, saved, seconds, num_steps=800, num_requests=1, seed=0):
    """The share of the second half of the steps that look, if a look saves as much on average."""
    random, looks = np.random.default_rng(seed), []
    for _ in range(num_steps):
        looks.append(value.looks(num_requests))
        if looks[-1]:
            # Few continuations save much, and most of them nothing.
            own = 5 * saved * (random.random() < 0.2)
            took = seconds * random.lognormal(0.0, 0.1)
            # Steps with more requests take longer, and more time is saved in them.
            value.observe(num_requests, num_requests * own, num_requests * took, num_requests)
    return float(np.mean(looks[num_steps // 2 :]))


@pytest.mark.parametrize("num_requests", [1, 32])
def test_looks_where_it_saves_more_than_it_costs(num_requests):
    shares = {
        saved: np.mean(
            [share_of_looks(LookingValue(), saved, 1.0, 800, num_requests, s) for s in range(5)]
        )
        for saved in (0.0, 0.3, 3.0)
    }
    assert shares[0.0] == pytest.approx(1 / 7, abs=0.002)
    assert shares[0.3] < 0.3
    assert shares[3.0] > 0.95


def test_a_change_of_the_text_is_followed():
    value = LookingValue()
    assert share_of_looks(value, 0.0, 1.0) < 0.2
    assert share_of_looks(value, 4.0, 1.0) > 0.8
    assert share_of_looks(value, 0.0, 1.0) < 0.2


def test_batch_sizes_have_their_own_records():
    value = LookingValue()
    share_of_looks(value, 0.0, 1.0, num_requests=1)
    assert share_of_looks(value, 3.0, 1.0, num_requests=32) > 0.95
    assert not all(value.looks(1) for _ in range(40))


@pytest.mark.parametrize(("saved", "share"), [(0.0, 1 / 7), (3.0, 1.0)])
def test_a_new_batch_size_begins_with_the_nearest_known_one(saved, share):
    value = LookingValue()
    share_of_looks(value, saved, 1.0, num_requests=1)
    share_of_looks(value, 3.0 - saved, 1.0, num_requests=64)
    assert np.mean([value.looks(2) for _ in range(70)]) == pytest.approx(share, abs=0.02)


def test_a_pause_of_the_machine_decides_nothing():
    value = LookingValue()
    assert share_of_looks(value, 3.0, 1.0) == 1.0
    value.observe(1, 3.0, 1000.0, 1.0)
    assert value.looks(1)


STATES = [RequestState(20, 4, 8, index) for index in range(2)]


class TestAdaptive:
    def policy(self):
        return create_policy("adaptive", PolicyContext(8, fixed_latency()), {})

    def step(self, policy, offer, took=0.001):
        """Run a step, and return whether it looked for continuations."""
        looks = policy.adds_offers(STATES)
        if looks:
            policy.plan_drafts([state._replace(offer=offer) for state in STATES])
            policy.looked_for_offers(took)
        else:
            policy.draft_lengths(STATES)
        zeros, nothing = torch.zeros(2, 0), (0, 0)
        outcome = Outcome(*(nothing,) * 4, zeros, prefix_acceptance_prob=zeros, num_known=nothing)
        policy.observe(outcome, StepTimes(0.0, 0.0, 0.0, 0.01, 0.0, 0.0))
        return looks

    def test_looks_while_continuations_are_good(self):
        good, bad = self.policy(), self.policy()
        looks = []
        for _ in range(200):
            is_trial = good.prices.will_measure(len(STATES))
            looks.append(self.step(good, (0.99,) * 8) or is_trial)
        assert all(looks)
        assert np.mean([self.step(bad, (0.01,)) for _ in range(200)][100:]) < 0.2

    def test_what_looking_takes_counts(self):
        slow = self.policy()
        looks = [self.step(slow, (0.99,) * 8, took=1.0) for _ in range(200)]
        assert np.mean(looks[100:]) < 0.2

    def test_steps_that_only_read_prompts_look_for_nothing(self):
        policy = self.policy()
        assert not policy.adds_offers([])
        assert policy.plan_drafts([]) == []
        policy.looked_for_offers(1.0)
        assert policy.looking.looks(1)

    def test_trials_of_operating_points_are_of_the_model_alone(self):
        policy, num_trials = self.policy(), 0
        for _ in range(200):
            tries = policy.prices.will_measure(len(STATES))
            looks = self.step(policy, (0.5,))
            assert not (tries and looks)
            num_trials += tries
        assert num_trials > 8

    def test_the_point_in_use_is_measured_although_all_its_steps_have_continuations(self):
        policy = self.policy()
        for _ in range(200):
            self.step(policy, (0.99,) * 8)
        (choice,) = policy.prices._choices.values()
        point = choice.incumbent.point
        assert point.max_length > 0
        assert choice.corrections.num_steps(point) >= 3

    @pytest.mark.parametrize(("added", "share"), [(0.0001, 0.9), (0.015, 0.1)])
    def test_without_a_model_steps_with_and_without_continuations_are_compared(self, added, share):
        """Where the operating point does not draft, what looking gains is measured."""
        slow_draft = FixedLatency(StageCost((1, 4096), (0.01, 0.02)), StageCost((1,), (0.1,)))
        policy, looked = create_policy("adaptive", PolicyContext(8, slow_draft), {}), []
        for _ in range(600):
            looks = policy.adds_offers(STATES)
            if looks:
                offered = [state._replace(offer=(0.5,)) for state in STATES]
                lengths = [choice.length for choice in policy.plan_drafts(offered)]
                policy.looked_for_offers(0.0)
            else:
                lengths = policy.draft_lengths(STATES)
            drafted = 1 if looks and any(lengths) else 0
            probs = torch.full((2, drafted), 0.5)
            each = (drafted, drafted)
            outcome = Outcome(
                each, each, each, each, probs, prefix_acceptance_prob=probs, num_known=each
            )
            verify = 0.010 + added * drafted
            policy.observe(outcome, StepTimes(0.0, 0.0, 0.0, verify, 0.0, 0.0))
            looked.append(looks)
        assert np.mean(looked[300:]) == pytest.approx(share, abs=0.1)

    def test_what_continuations_save_without_the_model_counts(self):
        """Texts may be longer than the draft model's context."""
        policy = self.policy()
        for _ in range(200):
            looks = policy.adds_offers(STATES)
            if looks:
                policy.plan_drafts([s._replace(offer=(0.99,) * 8, has_model=False) for s in STATES])
                policy.looked_for_offers(0.0001)
            else:
                policy.draft_lengths([s._replace(has_model=False) for s in STATES])
        assert policy.looking._records
        assert all(record.pays for record in policy.looking._records.values())
        (record,) = policy.looking._records.values()
        assert record.saved.value > 0.01

    def test_a_trial_ends_where_no_request_can_draft_with_the_model(self):
        """A text may become longer than the draft model's context during a trial."""
        policy = self.policy()
        while not policy.prices.will_measure(len(STATES)):
            self.step(policy, (0.5,))
        assert not policy.adds_offers(STATES)
        policy.draft_lengths([state._replace(has_model=False) for state in STATES])
        assert policy.adds_offers(STATES)
