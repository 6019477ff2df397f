"""What gained tokens are worth, compared with batches that are counted step by step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import Outcome, StepTimes
from draftwise.policies import PolicyContext, RequestState, create_policy
from draftwise.policies import makespan as module
from draftwise.policies.makespan import Makespan
from draftwise.policies.router import PolicyRouter

COST = StageCost((1, 4, 16), (0.010, 0.013, 0.040))
FLAT = StageCost((1, 16), (0.015, 0.026))
LEFT = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def states(left):
    return [RequestState(50, 5, 7, row, num_left=own) for row, own in enumerate(left)]


def seconds_of(left, cost=COST):
    """Time of a batch without drafts, step by step."""
    left, seconds = list(left), 0.0
    while any(left):
        seconds += cost(sum(own > 0 for own in left))
        left = [max(0, own - 1) for own in left]
    return seconds


@given(LEFT, st.data())
def test_worth_is_the_time_that_is_saved(left, data):
    gained = [data.draw(st.integers(0, own)) for own in left]
    after = [own - more for own, more in zip(left, gained, strict=True)]
    saved = (seconds_of(left) - seconds_of(after)) / COST(len(left)) * len(left)
    certain = module._CERTAINTY
    expected = certain * saved + (1 - certain) * sum(gained)
    found = Makespan(states(left), COST).worth(np.array(gained, float))
    assert found == pytest.approx(expected, abs=1e-6)


@given(LEFT)
def test_a_step_without_drafts_is_worth_its_tokens(left):
    assert Makespan(states(left), COST).worth(np.ones(len(left))) == pytest.approx(len(left))


def test_tokens_of_a_batch_that_others_join_are_worth_the_same():
    requests = [state._replace(num_left=None) for state in states([3, 30])]
    assert Makespan(requests, COST).worth(np.array([4.0, 1.0])) == 5.0


def loss_of_a_batch(num_left, seed=0):
    """Relative loss of a closed batch in which one of eight requests copies, half rightly."""
    latency = LatencyModel(FLAT)
    context = PolicyContext(7, latency, guarded=True)
    router = PolicyRouter(context, create_policy("fixed", context, {}))
    random, left, seconds = np.random.default_rng(seed), [200] * 8, 0.0
    alone = seconds_of(left, FLAT)
    while any(left):
        rows = [row for row, own in enumerate(left) if own]
        requests = [
            RequestState(
                50,
                5,
                min(7, left[row] - 1),
                row,
                has_model=False,
                offer=() if row else (0.9,) * 7,
                num_left=num_left(left[row]),
            )
            for row in rows
        ]
        lengths = router.plan_drafts(requests).lengths
        accepted = [length // 2 for length in lengths]
        taken = FLAT(len(rows) + sum(lengths))
        seconds += taken
        outcome = Outcome(
            tuple(lengths),
            tuple(lengths),
            tuple(accepted),
            (0,) * len(rows),
            is_copied=(True,) * len(rows),
        )
        chance = float(random.lognormal(0.0, 0.01))
        router.observe(outcome, StepTimes(0.0, 0.0, 0.0, chance * taken, 0.0, 0.0))
        for row, more in zip(rows, accepted, strict=True):
            left[row] -= 1 + more
    return seconds / alone - 1.0


def test_the_guard_knows_that_others_have_to_wait_for_the_last_request():
    closed, open_ = loss_of_a_batch(lambda own: own), loss_of_a_batch(lambda own: None)
    assert closed < 0.02
    assert open_ > 0.03


def test_a_poor_guard_does_not_look_for_continuations():
    latency = LatencyModel(COST)
    context = PolicyContext(7, latency, guarded=True)
    router = PolicyRouter(context, create_policy("fixed", context, {}))
    requests = [state._replace(has_model=False) for state in states([50] * 4)]
    looked = []
    for _ in range(200):
        looks = router.looks_for_offers(requests)
        looked.append(looks)
        offered = [state._replace(offer=(0.9,) * 7 if looks else ()) for state in requests]
        lengths = router.plan_drafts(offered).lengths
        outcome = Outcome(tuple(lengths), tuple(lengths), (0,) * 4, (0,) * 4, is_copied=(True,) * 4)
        taken = 0.0005 * looks + COST(4 + sum(lengths))
        router.observe(outcome, StepTimes(0.0, 0.0, 0.0, taken, 0.0, 0.0))
    assert any(looked)
    assert sum(looked[100:]) < 40
