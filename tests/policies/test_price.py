"""What ``adaptive`` chooses, on machines with known costs and drafts with known acceptance."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import Outcome, StepTimes
from draftwise.policies import PolicyContext, RequestState, create_policy
from draftwise.policies.router import PolicyRouter

from ..stand_ins import fixed_latency
from .driving import World, fix_choice, lengths_of, make, one_second, outcome_of, take_step
from .offering import TARGET, latency, offering

GAMMA = 7


class Machine:
    """Runs ``adaptive`` on drafts and copies with given acceptance, and measures goodput.

    Attributes:
        acceptance: of each token that the model drafts.
        target, draft: what passes take, in seconds.
        prepared: sizes of passes that were run before; a new size takes ``preparing`` seconds.
    """

    def __init__(self, acceptance, costs, target=None, draft=None, preparing=0.0, noise=0.05):
        context = PolicyContext(GAMMA, costs)
        self.policy = create_policy("adaptive", context, {})
        self.router = PolicyRouter(context, self.policy)
        self.acceptance = acceptance
        self.target, self.draft = target or costs.target, draft or costs.draft
        self.preparing, self.prepared = preparing, set()
        self.random, self.noise = random.Random(0), noise
        self.tokens = self.seconds = 0.0
        self.kinds = []

    def run(self, num_steps, size, offers=(), has_model=True, looking=0.0):
        for _ in range(num_steps):
            self.step(size, offers, has_model, looking)
        return self

    def step(self, size, offers, has_model, looking):
        requests = [RequestState(50, 5, GAMMA, row, has_model=has_model) for row in range(size)]
        searched = 0.0
        if offers and self.router.looks_for_offers(requests):
            searched = looking
            requests = [r._replace(offer=o) for r, o in zip(requests, offers, strict=True)]
        lengths, copies, _ = self.router.plan_drafts(requests)
        copied = [copy and n > 0 for n, copy in zip(lengths, copies, strict=True)]
        table = torch.zeros(size, max(lengths))
        for row, length in enumerate(lengths):
            own = offers[row][:length] if copied[row] else [self.acceptance] * length
            table[row, :length] = torch.tensor(list(itertools.accumulate(own, lambda a, b: a * b)))
        by_model = [0 if copy else n for n, copy in zip(lengths, copied, strict=True)]
        passes = [sum(n > place for n in by_model) for place in range(max(by_model))]
        rows = size + sum(lengths)
        new = {("target", rows), *(("draft", count) for count in passes)} - self.prepared
        preparing = self.preparing * len(new) if self.preparing else 0.0
        self.prepared |= new
        chance = self.random.lognormvariate(0.0, self.noise)
        draft = chance * sum(map(self.draft, passes)) + searched
        verify = chance * self.target(rows, 50 * size)
        is_new = preparing > 0
        times = StepTimes(
            *(draft, 0.0, 0.0, verify + preparing, 0.0, 0.0),
            disturbed=is_new,
            prepared=is_new,
            looking=searched if has_model else 0.0,
        )
        zero = (0,) * size
        outcome = Outcome(
            *(tuple(lengths), tuple(lengths), zero, zero, table, frozenset(), table),
            is_copied=tuple(copied),
        )
        self.router.observe(outcome, times)
        self.tokens += size + float(table.sum())
        self.seconds += (draft + verify) / chance if not is_new else draft + verify + preparing
        kind = max(by_model) if any(by_model) else "copies" if any(copied) else 0
        self.kinds.append(kind)

    def goodput(self):
        """Since the last call, relative to no speculation."""
        value = self.tokens / self.seconds
        self.tokens = self.seconds = 0.0
        return value

    def best_static(self, size):
        """The draft length with the best goodput, and its goodput."""
        goodput = {}
        for length in range(GAMMA + 1):
            tokens = size * (1 + sum(self.acceptance**i for i in range(1, length + 1)))
            seconds = length * self.draft(size) + self.target(size * (1 + length), 50 * size)
            goodput[length] = tokens / seconds
        return max(goodput.items(), key=lambda item: item[1])


class TestLength:
    @pytest.mark.parametrize("size", [1, 4, 16])
    @pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.85])
    @pytest.mark.parametrize("slow", [1.0, 4.0])
    def test_the_best_length_is_found(self, size, acceptance, slow):
        """Also where a pass of the draft takes four times as long as the profile says."""
        costs = latency()
        draft = StageCost(costs.draft.tokens, tuple(slow * s for s in costs.draft.seconds))
        machine = Machine(acceptance, costs, draft=draft).run(200, size)
        machine.goodput()
        machine.run(400, size)
        assert machine.goodput() >= 0.94 * machine.best_static(size)[1]

    def test_it_follows_a_change_of_the_drafts(self):
        machine = Machine(0.9, latency()).run(300, 1)
        assert max(machine.kinds[-20:]) >= 5
        machine.acceptance = 0.05
        machine.run(1000, 1)
        assert sum(kind != 0 for kind in machine.kinds[-100:]) < 40
        machine.acceptance = 0.9
        machine.run(3000, 1)
        assert sum(kind != 0 for kind in machine.kinds[-100:]) > 80

    def test_limits_of_requests_are_kept(self):
        policy = create_policy("adaptive", PolicyContext(GAMMA, fixed_latency()), {})
        requests = [RequestState(50, 5, limit, row) for row, limit in enumerate([0, 1, 3, 20])]
        for _ in range(5):
            lengths = lengths_of(policy, requests)
            assert all(
                n <= min(r.draft_limit, GAMMA) for n, r in zip(lengths, requests, strict=True)
            )

    def test_nothing_is_drafted_without_room(self):
        policy = create_policy("adaptive", PolicyContext(GAMMA, fixed_latency()), {})
        assert lengths_of(policy, [RequestState(50, 5, 0)]) == [0]
        assert lengths_of(policy, []) == []
        nothing = create_policy("adaptive", PolicyContext(0, fixed_latency()), {})
        assert lengths_of(nothing, [RequestState(50, 5, 5)]) == [0]

    def test_few_new_sizes_are_prepared(self):
        """A new size takes as long as ten steps."""
        machine = Machine(0.6, latency(), preparing=0.1).run(400, 4)
        assert len({size for kind, size in machine.prepared if kind == "target"}) <= 4


class TestSurvival:
    def test_positions_have_their_own_acceptance(self):
        policy = create_policy("adaptive", PolicyContext(3, fixed_latency()), {})
        requests = [RequestState(50, 5, 3, row) for row in range(8)]
        kept = torch.tensor([[0.9, 0.45, 0.09]]).repeat(8, 1)
        fix_choice(policy, 3)
        for _ in range(100):
            lengths_of(policy, requests)
            drafted = (3,) * 8
            outcome = Outcome(
                drafted, drafted, (0,) * 8, (0,) * 8, kept, prefix_acceptance_prob=kept
            )
            policy.observe(outcome, one_second())
        assert policy.survival() == pytest.approx([0.9, 0.45, 0.09], rel=0.1)

    def test_failed_requests_and_unverified_tokens_teach_nothing(self):
        policy = fix_choice(create_policy("adaptive", PolicyContext(3, fixed_latency()), {}), 3)
        lengths_of(policy, [RequestState(50, 5, 3, row) for row in range(2)])
        before = policy.survival()
        kept = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
        outcome = Outcome(
            (3, 3), (3, 0), (0, 0), (0, 0), kept, frozenset({0}), prefix_acceptance_prob=kept
        )
        policy.observe(outcome, one_second())
        assert np.array_equal(policy.survival(), before)


class TestCopies:
    @settings(deadline=None, derandomize=True, max_examples=50)
    @given(
        st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=4).filter(any)
    )
    def test_without_a_model_the_set_has_the_largest_goodput(self, offers):
        """Compared with all other numbers of tokens."""
        policy = create_policy("adaptive", PolicyContext(8, latency()), {})
        requests = offering(*map(tuple, offers), has_model=False)
        policy._begin(requests)
        lengths = policy._copies().lengths.tolist()

        def goodput(counts):
            reach = [list(itertools.accumulate(o, lambda a, b: a * b)) for o in offers]
            gained = sum(sum(own[:n]) for own, n in zip(reach, counts, strict=True))
            size = len(offers)
            return (size + gained) / TARGET(size + sum(counts), 50 * size)

        best = max(map(goodput, itertools.product(*(range(len(o) + 1) for o in offers))))
        assert goodput(lengths) == pytest.approx(best, rel=1e-9)

    def test_a_good_copy_is_preferred_to_a_poor_model(self):
        good = (0.98,) * GAMMA
        machine = Machine(0.2, latency(draft=0.004)).run(300, 2, [good, ()])
        assert machine.kinds.count("copies") > 200

    def test_a_good_model_is_preferred_to_a_poor_copy(self):
        machine = Machine(0.9, latency()).run(300, 2, [(0.2, 0.1), (0.2, 0.1)])
        assert sum(isinstance(k, int) and k > 0 for k in machine.kinds) > 250

    def test_looking_that_costs_more_than_it_gains_becomes_rare(self):
        """Looking takes as long as a fifth of a step and finds nothing of use."""
        machine = Machine(0.8, latency()).run(600, 2, [(0.05,), (0.05,)], looking=0.002)
        looks = []
        ask = machine.router.looks_for_offers
        machine.router.looks_for_offers = lambda requests: looks.append(ask(requests)) or looks[-1]
        machine.run(200, 2, [(0.05,), (0.05,)], looking=0.002)
        assert sum(looks) < 20

    def test_looking_without_a_model_becomes_rare_too(self):
        slow = StageCost((1, 64), (0.01, 0.02))
        machine = Machine(0.0, LatencyModel(slow))
        machine.run(600, 2, [(0.02,), (0.02,)], has_model=False)
        assert machine.kinds.count("copies") < 60

    def test_requests_choose_by_one_price(self):
        """The request with the good copy uses it, and the model drafts for the other one."""
        router = Machine(0.9, latency(draft=0.0001)).run(100, 2).router
        requests = offering((0.99,) * 7, (0.05,))
        kinds = set()
        for _ in range(5):
            nothing, copies, _ = router.plan_drafts(requests)
            kinds.add(tuple(copy for n, copy in zip(nothing, copies, strict=True) if n))
            nothing = tuple(nothing)
            table = torch.zeros(2, max(nothing))
            router.observe(
                Outcome(nothing, nothing, (0, 0), (0, 0), table, prefix_acceptance_prob=table),
                replace(one_second(), disturbed=True),
            )
        assert (True, False) in kinds


def test_decisions_use_nothing_that_the_model_draws():
    """Drafts are cut nowhere but at their length, and all of them are verified."""
    world = World.random(4, 3, seed=1)
    policy = fix_choice(make("adaptive", 3), 2)
    step = take_step(policy, world)
    assert step.draft.lengths == step.plan.lengths == (2,) * 4
    assert not policy.uses_draft_signals
    assert not policy.may_stop_drafting
    policy.observe(outcome_of(world, step), one_second())


def test_parts_of_mixed_batches_are_priced_by_the_profile():
    context = PolicyContext(GAMMA, latency())
    router = PolicyRouter(context, create_policy("adaptive", context, {}))
    requests = [
        RequestState(50, 5, GAMMA, row, policy="fixed" if row % 2 else None) for row in range(4)
    ]
    for _ in range(3):
        lengths = lengths_of(router, requests)
        assert len(lengths) == 4
        table = torch.zeros(4, max(lengths))
        drafted = tuple(lengths)
        router.observe(
            Outcome(drafted, drafted, (0,) * 4, (0,) * 4, table, prefix_acceptance_prob=table),
            one_second(),
        )
    assert lengths[1] == lengths[3] == GAMMA
