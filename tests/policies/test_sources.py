"""The choice between an offer and a draft model, for each request."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.goodput import StepEstimate
from draftwise.policies.offers import OfferPricing
from draftwise.policies.sources import SourceChoice

from .offering import latency, offering


def choose(requests, draft=0.001, gained=1.5, choice=None, passes=3.0, slowdown=1.0, pays=True):
    """Who uses the model, and the seconds that the choice saves, if a token is worth 10 ms."""
    count, costs = len(requests), latency(draft)
    values = np.full(count, 0.010)
    selected = OfferPricing(costs).select(requests, values, 0)
    estimate = StepEstimate(count * (1 + gained), 0.02, count * 3.0, passes)
    choice = choice or SourceChoice(costs)
    prefers, saved = choice.choose(
        requests, values, selected, 0, estimate if pays else None, slowdown
    )
    return prefers.tolist(), saved


def prefers(*arguments, **settings):
    return choose(*arguments, **settings)[0]


def test_the_model_drafts_where_nothing_is_offered():
    assert prefers(offering((), (0.99,) * 8)) == [True, False]


def test_a_pass_that_few_requests_share_is_too_expensive():
    few = offering((), *[(0.99,) * 8] * 3)
    assert prefers(few, draft=0.008) == [False] * 4
    many = offering((), (), (), ())
    assert prefers(many, draft=0.008) == [True] * 4


def test_drafts_that_end_early_have_fewer_passes():
    requests = offering(())
    assert prefers(requests, draft=0.006) == [False]
    assert prefers(requests, draft=0.006, passes=1.2) == [True]


def test_a_model_that_is_behind_costs_more():
    requests = offering(())
    assert prefers(requests, draft=0.0035) == [True]
    behind = [requests[0]._replace(num_behind=500)]
    assert prefers(behind, draft=0.0035) == [False]


def test_steps_with_the_model_that_take_longer_than_estimated_cost_more():
    requests = offering((0.6, 0.6))
    assert prefers(requests) == [True]
    assert prefers(requests, slowdown=1.5) == [False]


def test_a_model_that_does_not_pay_is_not_used():
    assert prefers(offering((), (0.9,)), pays=False) == [False, False]


def test_without_continuations_looking_saves_nothing():
    """Also where the model is worth its cost for some requests only."""
    choice = SourceChoice(latency(0.003))
    low, high = offering((), history=0.2)[0], offering((), history=0.9)[0]
    for _ in range(100):
        choice.gains.observe([low, high], np.array([0.0, 3.0]), 1.5)
    uses_model, saved = choose([low, high], 0.003, choice=choice)
    assert uses_model == [False, True]
    assert saved == pytest.approx(0.0)


def test_requests_with_a_better_history_gain_more():
    choice = SourceChoice(latency(0.003))
    low, high = offering((), history=0.2)[0], offering((), history=0.9)[0]
    for _ in range(100):
        choice.gains.observe([low, high], np.array([0.0, 3.0]), 1.5)
    assert prefers([low, high], 0.003, choice=choice) == [False, True]


def test_the_model_gains_more_where_offers_are_good():
    """If that was so before. Then an offer that would beat the model's mean does not."""
    choice = SourceChoice(latency(0.003))
    good, none = offering((0.9, 0.9))[0], offering(())[0]
    assert prefers([good], 0.0002, choice=choice) == [False]
    for _ in range(100):
        choice.gains.observe([good, none], np.array([3.5, 0.5]), 1.5)
    assert prefers([good], 0.0002, choice=choice) == [True]


def test_what_drafts_gain_corrects_the_estimate():
    """It is learnt at one operating point and applies to others."""
    choice = SourceChoice(latency())
    requests = offering((), ())
    for _ in range(200):
        choice.gains.observe(requests, np.array([0.5, 0.5]), 1.0)
    assert choice.gains.expected(requests, 3.0) == pytest.approx(2.5, abs=0.05)
    assert choice.gains.expected(requests, 0.2) == pytest.approx(0.0, abs=0.05)


offers = st.lists(st.lists(st.sampled_from([0.1, 0.5, 0.9]), max_size=3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(offers, st.floats(0.0002, 0.01), st.floats(0.0, 3.0))
def test_continuations_never_cost_without_the_search(own, draft, gained):
    """Each request may use what it would use without them."""
    requests = offering(*own)
    saved = choose(requests, draft, gained)[1]
    assert saved >= -1e-12
    if not any(own):
        assert saved == pytest.approx(0.0)


def test_good_continuations_save_more():
    saved = [choose(offering((p,) * 4))[1] for p in (0.05, 0.5, 0.9, 0.99)]
    assert saved == sorted(saved)
    assert saved[0] < 0.001 < saved[-1]


def test_the_pace_follows_the_machine_and_not_its_pauses():
    choice = SourceChoice(latency())
    assert choice.pace(4) == 1.0
    seconds = 1.3 * latency().target_seconds(6)
    for _ in range(20):
        choice.observe_pace(4, 0, 2, seconds)
    assert choice.pace(4) == pytest.approx(1.3)
    choice.observe_pace(4, 0, 2, 100.0)
    assert choice.pace(4) < 1.6


def test_each_batch_size_has_its_own_pace_and_begins_with_the_nearest_known_one():
    choice = SourceChoice(latency())
    for count, pace in ((4, 1.3), (64, 0.8)):
        seconds = pace * latency().target_seconds(count)
        for _ in range(200):
            choice.observe_pace(count, 0, 0, seconds)
    assert choice.pace(5) == pytest.approx(1.3)
    assert choice.pace(40) == pytest.approx(0.8, abs=0.001)
    choice.observe_pace(16, 0, 0, latency().target_seconds(16))
    assert 1.0 < choice.pace(16) < 1.3
    # One step is not enough to be the beginning of others.
    assert choice.pace(20) != choice.pace(16)
