"""Prices of offered tokens: the selection over the batch."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.types import Outcome, StepTimes
from draftwise.policies import PolicyContext, create_policy
from draftwise.policies.offers import OfferPricing
from draftwise.policies.router import PolicyRouter
from draftwise.policies.token_weights import TokenWeights

from ..stand_ins import fixed_latency
from .offering import latency, offering


def observe(pricing, num_tokens, seconds, num_verified=0, num_requests=8):
    """A step."""
    times = StepTimes(0.0, 0.0, 0.0, seconds, 0.0, 0.0)
    pricing.observe(num_requests, 0, num_verified, num_tokens, times)


probabilities = st.lists(st.sampled_from([0.05, 0.3, 0.6, 0.9]), max_size=3)


@settings(deadline=None, max_examples=80)
@given(st.lists(probabilities, min_size=1, max_size=4), st.floats(0.0005, 0.02))
def test_the_selection_saves_most(offers, value):
    """Against all selections."""
    model = latency()
    requests = offering(*offers)
    values = np.full(len(requests), value)
    chosen = OfferPricing(model).select(requests, values, 0)

    def net(lengths):
        saved = sum(
            value * np.cumprod(offer)[:length].sum()
            for offer, length in zip(offers, lengths, strict=True)
        )
        return saved - model.target_seconds(len(offers) + sum(lengths))

    best = max(net(lengths) for lengths in itertools.product(*(range(len(o) + 1) for o in offers)))
    assert net(chosen.tolist()) == pytest.approx(best)


def test_without_offers_nothing_is_selected():
    assert OfferPricing(latency()).select(offering((), ()), np.ones(2), 0).tolist() == [0, 0]


def test_the_goodput_is_at_least_that_of_no_speculation():
    pricing = OfferPricing(latency())
    assert pricing.goodput(8, 0) == pytest.approx(8 / 0.012)
    for _ in range(50):
        observe(pricing, 24, 0.015)
    assert pricing.goodput(8, 0) == pytest.approx(24 / 0.015, rel=0.01)
    for _ in range(500):
        observe(pricing, 8, 0.5)
    assert pricing.goodput(8, 0) == pytest.approx(8 / 0.012)
    assert pricing.goodput(1, 0) == pytest.approx(1 / 0.010)


def looked(pricing, num_steps, tokens, seconds, alone=0.012, num_requests=8):
    """Which of some steps look for offers."""
    found = []
    for _ in range(num_steps):
        looks = pricing.looks(num_requests)
        gained, duration = (tokens, seconds) if looks else (num_requests, alone)
        observe(pricing, gained, duration, num_requests=num_requests)
        found.append(looks)
    return found


def test_some_steps_look_for_nothing_to_learn_their_time():
    pricing = OfferPricing(latency())
    found = looked(pricing, 240, 9, 0.012)
    rests = [step for step, looks in enumerate(found, 1) if not looks]
    # Often until their time is known. Then two steps in 45 that gain 1 instead of 1.125.
    assert rests == [step + each for step in (6, 14, 22, *range(43, 240, 45)) for each in (0, 1)]
    little = OfferPricing(latency())
    looked(little, 100, 9, 0.0134)
    assert looked(little, 240, 9, 0.0134).count(False) == 20
    much = OfferPricing(latency())
    assert looked(much, 800, 24, 0.015).count(False) < 16


def test_offers_that_do_not_pay_become_the_exception():
    pricing = OfferPricing(latency())
    looked(pricing, 100, 9, 0.014)
    assert looked(pricing, 100, 9, 0.014).count(True) == 10
    # The text begins to repeat itself.
    looked(pricing, 300, 24, 0.015)
    assert looked(pricing, 80, 24, 0.015).count(True) > 70


@pytest.mark.parametrize(
    ("tokens", "stops"),
    [((6, 6, 6, 6, 6), True), ((5, 5, 5, 5, 10), False)],
    ids=["the same in every step", "rarely many"],
)
def test_offers_become_the_exception_once_it_is_certain_that_they_do_not_pay(tokens, stops):
    """Steps with offers gain 1.2 tokens per request, in a time in which 1.26 would be gained."""
    pricing = OfferPricing(latency())
    alone = pricing.usual_seconds(5, 0)
    for gained in tokens * 40:
        looks = pricing.looks(5)
        seconds = alone * 1.2 / 0.95 if looks else alone
        observe(pricing, gained if looks else 5, seconds, num_requests=5)
    found = [pricing.looks(5) for _ in range(80)]
    assert found.count(True) == (8 if stops else 60)


def test_learning_from_the_offers_of_the_step_before_is_not_counted_as_a_step_without_them():
    """Offers gain 8 tokens per step; learning from them takes 3 ms of the next step."""
    pricing = OfferPricing(latency())
    before = True
    for _ in range(200):
        looks = pricing.looks(8)
        observe(pricing, 16 if looks else 8, 0.012 + 0.003 * before + 0.006 * looks)
        before = looks
    assert pricing.goodput(8, 0) == pytest.approx(16 / 0.021)
    slower = OfferPricing(latency())
    before = True
    for _ in range(200):
        looks = slower.looks(8)
        observe(slower, 10 if looks else 8, 0.012 + 0.003 * before + 0.001 * looks)
        before = looks
    # 10 / 0.016 is less than 8 / 0.012.
    assert slower.goodput(8, 0) == pytest.approx(8 / 0.012)


def test_batch_sizes_are_judged_apart():
    pricing = OfferPricing(latency())
    looked(pricing, 100, 9, 0.014)
    assert looked(pricing, 80, 3, 0.011, alone=0.010, num_requests=1).count(True) > 60


def test_an_unknown_batch_size_follows_the_nearest_known_one():
    pricing = OfferPricing(latency())
    looked(pricing, 100, 9, 0.014)
    looked(pricing, 100, 48, 0.020, alone=0.015, num_requests=20)
    assert looked(pricing, 4, 6, 0.012, alone=0.011, num_requests=5).count(True) <= 2
    assert looked(pricing, 4, 30, 0.016, alone=0.014, num_requests=16).count(True) >= 2
    other = OfferPricing(latency())
    assert all(looked(other, 4, 6, 0.012, alone=0.011, num_requests=5))


def test_the_measured_time_without_offers_replaces_the_estimate():
    pricing = OfferPricing(latency())
    looked(pricing, 100, 9, 0.012, alone=0.006)
    assert pricing.goodput(8, 0) == pytest.approx(8 / 0.006)


def test_a_step_that_does_not_look_verifies_nothing():
    pricing = OfferPricing(latency())
    requests = offering(*[(0.9, 0.9)] * 8)
    values = np.full(8, 0.1)
    for _ in range(30):
        looks = pricing.looks(8)
        assert any(pricing.select(requests, values, 0)) == looks


@pytest.mark.parametrize(("factor", "selected"), [(1.0, 8), (1.5, 0), (0.7, 8)])
def test_what_tokens_add_is_measured(factor, selected):
    """Eight tokens add 8 ms by the cost model; each is worth 1.2 ms."""
    pricing = OfferPricing(latency())
    for _ in range(300):
        looks = pricing.looks(8)
        # The machine is slower than the cost model says.
        seconds = 1.1 * (0.012 + factor * 0.008 * looks)
        observe(pricing, 24 if looks else 8, seconds, 8 * looks)
    assert pricing.looks(8)
    requests = offering(*[(0.999,)] * 8)
    chosen = pricing.select(requests, np.full(8, 1.2e-3 * 1.1), 0)
    assert chosen.sum() == selected


def test_a_cost_that_is_out_of_the_ordinary_is_limited():
    pricing = OfferPricing(latency())
    for _ in range(301):
        looks = pricing.looks(8)
        observe(pricing, 1000 if looks else 8, 0.5 if looks else 0.012, 8 * looks)
    requests = offering(*[(0.999,)] * 8)
    assert pricing.select(requests, np.full(8, 2.2e-3), 0).sum() == 8
    assert pricing.select(requests, np.full(8, 1.8e-3), 0).sum() == 0


def test_a_pause_of_the_machine_changes_little():
    pricing = OfferPricing(latency())
    for number in range(300):
        looks = pricing.looks(8)
        pause = 5.0 if number in (25, 40, 110, 220) else 0.0
        observe(pricing, 24 if looks else 8, (0.020 if looks else 0.012) + pause, 8 * looks)
    record = pricing._record(8)
    assert record.gain == pytest.approx(1.8, rel=0.3)
    assert record.excess == pytest.approx(1.0, rel=0.3)


def test_a_cost_that_was_measured_is_forgotten_where_nothing_is_verified():
    pricing = OfferPricing(latency())
    for _ in range(200):
        looks = pricing.looks(8)
        observe(pricing, 24 if looks else 8, 0.040 if looks else 0.012, 8 * looks)
    assert pricing._record(8).excess > 1.5
    for _ in range(3000):
        looks = pricing.looks(8)
        observe(pricing, 8, 0.012)
    assert pricing._record(8).excess < 1.2


def test_a_change_lasts_for_two_steps_also_if_the_batch_shrinks():
    pricing = OfferPricing(latency())
    found = [pricing.looks(8 - number // 30) for number in range(88)]
    rests = [number for number, looks in enumerate(found) if not looks]
    assert rests
    assert all(number + 1 in rests or number - 1 in rests for number in rests)
    assert not pricing.looks(0)


def test_weights_change_the_selection():
    pricing = OfferPricing(latency())
    requests = offering(*[(0.9,)] * 8, remaining=3.0)

    def selected():
        values = TokenWeights(latency()).weights(requests, 0) / pricing.goodput(8, 0)
        return pricing.select(requests, values, 0)

    even = selected()
    requests[5] = requests[5]._replace(expected_remaining=60.0)
    uneven = selected()
    assert even.tolist() == [1] * 8
    assert uneven.tolist() == [int(row == 5) for row in range(8)]


def test_a_policy_without_prices_takes_the_source_that_gains_more():
    policy = create_policy("fixed", PolicyContext(3), {})
    requests = offering((0.9, 0.9, 0.9), (0.2,), (), history=0.6)
    requests.append(requests[1]._replace(has_model=False))
    choices = policy.plan_drafts(requests)
    assert [choice.uses_offer for choice in choices] == [True, False, False, True]
    assert [choice.length for choice in choices] == [3, 3, 3, 3]


def test_each_policy_of_a_batch_plans_for_its_own_requests():
    context = PolicyContext(3, fixed_latency())
    router = PolicyRouter(context, create_policy("adaptive", context, {}))
    requests = offering((0.99,) * 3, (0.99,) * 3, has_model=False)
    requests[1] = requests[1]._replace(policy="none", draft_limit=3)
    first, second = router.plan_drafts(requests)
    assert first == (3, True)
    assert second.length == 0
    assert not router.reads_offers()


def test_a_batch_without_a_look_is_only_timed():
    context = PolicyContext(3, fixed_latency())
    adaptive = create_policy("adaptive", context, {})
    router = PolicyRouter(context, adaptive)
    requests = offering((), ())
    adaptive.offers.looks = lambda *_: False
    assert not router.looks_for_offers(requests)
    router.skip_drafts(requests)
    timed = []
    adaptive.offers.observe = lambda *step: timed.append(step[:4])
    zeros = torch.zeros(2, 0)
    outcome = Outcome((0, 0), (0, 0), (0, 0), (5, 6), zeros, frozenset(), zeros, (0, 0))
    router.observe(outcome, StepTimes(0.0, 0.0, 0.0, 0.01, 0.0, 0.0))
    assert timed == [(2, 100, 0, 2.0)]
    # A policy that always looks lets the others search, too.
    requests[1] = requests[1]._replace(policy="fixed")
    assert router.looks_for_offers(requests)


def test_steps_that_look_and_the_first_ones_that_do_not_are_learnt_from(monkeypatch):
    policy = create_policy("adaptive", PolicyContext(3, fixed_latency()), {"warm_up": 0})
    calls, learnt = [], []
    monkeypatch.setattr(policy.offers, "observe", lambda *_: calls.append(1))
    requests = offering((), (), has_model=False)
    zeros = torch.zeros(2, 0)
    outcome = Outcome((0, 0), (0, 0), (0, 0), (5, 6), zeros, frozenset(), zeros, (0, 0))
    for step in range(22):
        looks = step < 4 or step in (10, 11)
        monkeypatch.setattr(policy.offers, "looks", lambda *_, looks=looks: looks)
        calls.clear()
        if policy.looks_for_offers(requests):
            policy.plan_drafts(requests)
        else:
            policy.skip_drafts(requests)
        policy.observe(outcome, StepTimes(0.0, 0.0, 0.0, 0.01, 0.0, 0.0))
        learnt += [step] * len(calls)
    assert learnt == [0, 1, 2, 3, 4, 5, 7, 10, 11, 12, 13, 15, 19]
