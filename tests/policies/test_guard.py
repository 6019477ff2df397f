"""The guard's promise, with policies that lose time, on simulated machines."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import Outcome, StepTimes
from draftwise.policies import POLICIES, PolicyContext, RequestState, create_policy
from draftwise.policies.guard import Guard, bucket_key
from draftwise.policies.router import PolicyRouter

from .driving import lengths_of

TARGET = StageCost((1, 8, 16, 64, 512), (0.010, 0.012, 0.020, 0.080, 0.700))
DRAFT = StageCost((1, 64), (0.001, 0.002))
GAMMA = 7


def latency():
    return LatencyModel(TARGET, DRAFT)


def requests_of(size, limit=GAMMA):
    return [RequestState(50, 5, limit, row) for row in range(size)]


class Machine:
    """Steps of a policy whose drafts are accepted with one probability for each token.

    Attributes:
        lost: for each step, the time lost so far against no speculation, in steps without drafts.
        saved: for each step, the seconds that its drafts saved for a request that gained three
            tokens: the guard's estimate, and the true ones.
    """

    def __init__(self, policy, acceptance, slower=1.0, noise=0.0, guarded=True):
        context = PolicyContext(GAMMA, latency(), guarded=guarded)
        self.router = PolicyRouter(context, create_policy(policy, context, {}))
        self.acceptance, self.slower, self.noise = acceptance, slower, noise
        self.random = random.Random(0)
        self.lost = [0.0]
        self.drafted, self.saved = [], []

    def run(self, size, num_steps):
        for _ in range(num_steps):
            self.step(size)
        return self

    def step(self, size):
        lengths = lengths_of(self.router, requests_of(size))
        self.drafted.append(max(lengths))
        kept = [[self.acceptance**i for i in range(1, n + 1)] for n in lengths]
        width = max(lengths)
        table = torch.zeros(size, width)
        for row, own in enumerate(kept):
            table[row, : len(own)] = torch.tensor(own)
        alone = TARGET(size, 50 * size)
        passes = [sum(n > place for n in lengths) for place in range(width)]
        draft = self.slower * sum(map(DRAFT, passes))
        verify = self.slower * (TARGET(size + sum(lengths), 50 * size) - alone) + alone
        chance = self.random.lognormvariate(0.0, self.noise)
        times = StepTimes(chance * draft, 0.0, 0.0, chance * verify, 0.0, 0.0)
        outcome = Outcome(
            tuple(lengths), tuple(lengths), (0,) * size, (0,) * size, table, frozenset(), table
        )
        self.router.observe(outcome, times)
        saved = float(table.sum()) / size - ((draft + verify) / alone - 1.0)
        self.lost.append(self.lost[-1] - saved)
        estimate = self.router.guard.saved(3)
        self.saved.append((estimate, 3 * alone - draft - verify))


STATIC = [name for name, policy in POLICIES.items() if name in ("fixed", "heuristic", "smartspec")]


@pytest.mark.parametrize("policy", [*STATIC, "adaptive"])
@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6])
def test_the_loss_over_any_run_is_one_step_and_one_per_cent(policy, size, acceptance):
    machine = Machine(policy, acceptance).run(size, 400)
    for steps, lost in enumerate(machine.lost):
        assert lost <= 1.0 + 0.01 * steps + 1e-6


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.sampled_from([*STATIC, "adaptive"]),
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 16]), st.integers(1, 60)), min_size=1, max_size=6),
    st.floats(0.0, 0.9),
)
def test_the_promise_holds_while_the_load_changes(policy, parts, acceptance):
    machine = Machine(policy, acceptance)
    for size, num_steps in parts:
        machine.run(size, num_steps)
    for steps, lost in enumerate(machine.lost):
        assert lost <= 1.0 + 0.01 * steps + 1e-6


@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_a_profile_that_is_wrong_costs_a_little_more(slower):
    """The first drafts take longer than estimated."""
    machine = Machine("fixed", 0.3, slower=slower, noise=0.05).run(16, 400)
    assert machine.lost[-1] <= 1.0 + 0.02 * 400


def test_without_the_guard_the_loss_has_no_limit():
    assert Machine("fixed", 0.0, guarded=False).run(16, 50).lost[-1] > 50


def test_drafts_that_save_time_are_not_shortened():
    machine = Machine("fixed", 0.9).run(1, 200)
    assert machine.drafted[:2] == [0, 0]
    assert np.mean(np.array(machine.drafted) == GAMMA) > 0.9


def test_two_steps_without_drafts_come_first_at_every_batch_size():
    machine = Machine("fixed", 0.9)
    for size in (1, 4, 1, 16):
        machine.run(size, 4)
    zero = [length == 0 for length in machine.drafted]
    assert zero[0:2] == zero[4:6] == zero[12:14] == [True, True]
    assert not any(zero[8:12])


def test_steps_without_drafts_are_measured_again():
    machine = Machine("fixed", 0.9).run(1, 2000)
    rests = sum(length == 0 for length in machine.drafted[2:])
    assert 2 <= rests <= 20


def test_savings_do_not_pay_for_long_losses():
    machine = Machine("fixed", 0.9).run(1, 300)
    best = min(machine.lost)
    machine.acceptance = 0.0
    machine.run(1, 300)
    assert machine.lost[-1] - best <= 16 + 1 + 0.01 * 300


def test_similar_batch_sizes_share_what_is_known():
    assert [bucket_key(n) for n in (1, 2, 3, 4, 6, 8, 12, 32)] == [1, 2, 4, 4, 8, 8, 16, 32]


class TestShortening:
    def guard(self, balance, size=4):
        guard = Guard(latency())
        guard.begin(requests_of(size))
        guard.balance = balance
        return guard

    def seconds(self, guard, lengths):
        lengths = np.array(lengths)
        return guard.computed(lengths, np.ones(len(lengths), bool)) / guard.computed_alone

    def test_the_longest_affordable_draft_is_left(self):
        for balance in (0.0, 0.2, 0.5, 1.0, 2.0, 16.0):
            guard = self.guard(balance)
            left = guard.shortened([7, 7, 2, 0], [True] * 4, False, False)
            assert self.seconds(guard, left) - 1 <= balance
            longest = max(left)
            if longest < 7:
                more = np.minimum([7, 7, 2, 0], longest + 1)
                assert self.seconds(guard, more) - 1 > balance

    def test_a_disabled_guard_leaves_everything(self):
        guard = Guard(latency(), enabled=False)
        guard.begin(requests_of(2))
        guard.balance = -math.inf
        assert guard.shortened([7, 3], [True, True], False, False) == [7, 3]

    def test_scoring_is_part_of_the_cost(self):
        costs = LatencyModel(TARGET, DRAFT, StageCost((1, 64), (1.0, 1.0)))
        guard = Guard(costs)
        guard.begin(requests_of(2))
        assert guard.shortened([3, 3], [True, True], True, False) == [0, 0]
        assert max(guard.shortened([3, 3], [True, True], False, False)) > 0

    def test_copied_tokens_need_no_pass_of_the_model(self):
        slow = LatencyModel(TARGET, StageCost((1, 64), (1.0, 1.0)))
        guard = Guard(slow)
        guard.begin(requests_of(2))
        assert guard.shortened([3, 3], [False, True], False, False) == [0, 0]
        assert guard.shortened([3, 0], [False, True], False, False) == [3, 0]


def test_prompts_and_disturbed_steps_teach_no_times():
    guard = Guard(latency())
    guard.begin(requests_of(1))
    nothing = Outcome((0,), (0,), (0,), (0,), torch.zeros(1, 0), frozenset(), torch.zeros(1, 0))
    for more in ({"num_prompt_tokens": 5}, {"disturbed": True}):
        guard.observe(nothing, StepTimes(0.0, 0.0, 0.0, 9.0, 0.0, 0.0, **more))
    assert guard.bucket.times.num_steps == 0
    assert guard.bucket.times.factor(0) == 1.0


@pytest.mark.parametrize("size", [1, 8])
def test_the_seconds_that_drafts_save_are_estimated(size):
    machine = Machine("fixed", 0.9, noise=0.02).run(size, 200)
    steps = list(zip(machine.saved, machine.drafted, strict=True))
    assert sum(length > 0 for _, length in steps[50:]) > 50
    estimated, true = np.array([pair for pair, _ in steps[50:]]).T
    assert estimated.sum() == pytest.approx(true.sum(), rel=0.05)


def test_savings_are_unknown_before_a_step_without_drafts():
    machine = Machine("fixed", 0.9, guarded=False).run(1, 20)
    assert all(length > 0 for length in machine.drafted)
    assert all(estimate is None for estimate, _ in machine.saved)
