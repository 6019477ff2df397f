"""What a token more is worth, against slow and independent ways to say the same."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.goodput import (
    _GRID,
    Costs,
    OperatingPoint,
    Outlook,
    advised_draft_length,
    expected_accepted,
    promises,
    worth_drafting,
)
from draftwise.core.traces import Traces, imagined

property_test = settings(deadline=None, derandomize=True, max_examples=60)
probabilities = st.floats(0.0, 1.0)
outlooks = st.lists(probabilities, min_size=1, max_size=4).map(np.array)
prices = st.floats(0.02, 0.9)
draft_prices = st.floats(0.005, 0.5)


@property_test
@given(probabilities, st.integers(0, 8))
def test_expected_accepted(acceptance, num_tokens):
    """All ways in which a draft can fare, each with its probability."""
    expected = 0.0
    for kept in itertools.product([True, False], repeat=num_tokens):
        probability = math.prod(acceptance if each else 1 - acceptance for each in kept)
        expected += probability * len(list(itertools.takewhile(bool, kept)))
    assert expected_accepted(acceptance, num_tokens) == pytest.approx(expected, abs=1e-9)


def value(reach, draws, outlook, verify_price, draft_price):
    """V_k(w), exactly, by following every branch."""
    if draws == 0:
        return 0.0
    worth = -draft_price
    for acceptance in outlook:
        after = reach * acceptance
        if after >= verify_price:
            later = value(after, draws - 1, outlook, verify_price, draft_price)
            worth += (after - verify_price + max(0.0, later)) / len(outlook)
    return worth


def needed(outlook, verify_price, draft_price, draws):
    """``[draws + 1]`` at one price of a draft."""
    return worth_drafting(outlook, verify_price, np.array([draft_price]), draws)[0]


class TestWorthDrafting:
    @property_test
    @given(outlooks, prices, draft_prices, st.integers(1, 4))
    def test_equals_the_exact_recursion(self, outlook, verify_price, draft_price, draws):
        thresholds = needed(outlook, verify_price, draft_price, draws)
        assert thresholds.shape == (draws + 1,)
        assert thresholds[0] == math.inf
        threshold = thresholds[draws]

        def exact(reach):
            return value(reach, draws, outlook, verify_price, draft_price)

        # Where the value bends between two points of its grid the threshold is off by up to a step.
        step = math.exp(_GRID[1] - _GRID[0])
        if threshold == math.inf:
            assert exact(1.0) <= 1e-3
        else:
            assert exact(min(1.0, step * threshold)) >= -1e-3
            assert exact(threshold / step) <= 1e-3

    def test_what_hardly_pays_verification_is_off_by_less_than_a_step(self):
        """The value is flat up to c/P and rises from there: its zero lies behind the bend."""
        threshold = needed(np.array([0.65625]), 0.625, 0.015625, 1)[1]
        exact = (0.625 + 0.015625) / 0.65625
        assert threshold == pytest.approx(exact, rel=0.06)

    @property_test
    @given(outlooks, prices, draft_prices, st.floats(1.0, 3.0))
    def test_what_costs_more_pays_later(self, outlook, verify_price, draft_price, factor):
        thresholds = needed(outlook, verify_price, draft_price, 5)
        for dearer in (
            needed(outlook, verify_price * factor, draft_price, 5),
            needed(outlook, verify_price, draft_price * factor, 5),
        ):
            assert (dearer >= thresholds * (1 - 1e-9)).all()

    @property_test
    @given(outlooks, prices, draft_prices)
    def test_more_draws_are_worth_more(self, outlook, verify_price, draft_price):
        thresholds = needed(outlook, verify_price, draft_price, 6)
        assert (thresholds[1:] <= thresholds[:-1] * (1 + 1e-9)).all()

    def test_one_draw_of_one_kind(self):
        """w·α − c ≥ d, so w = (c + d)/α."""
        thresholds = needed(np.array([0.8]), 0.3, 0.1, 1)
        assert thresholds[1] == pytest.approx(0.5, rel=0.01)

    @property_test
    @given(outlooks, prices, st.lists(draft_prices, min_size=1, max_size=5))
    def test_prices_do_not_meet(self, outlook, verify_price, several):
        together = worth_drafting(outlook, verify_price, np.array(several), 4)
        alone = [needed(outlook, verify_price, price, 4) for price in several]
        assert together == pytest.approx(np.stack(alone), rel=1e-9)

    def test_what_is_free_always_pays(self):
        assert needed(np.array([0.5]), 0.0, 0.0, 3)[1:].tolist() == [0, 0, 0]

    def test_what_is_never_kept_never_pays(self):
        assert needed(np.array([0.0]), 0.1, 1e-3, 3).tolist() == [math.inf] * 4


@pytest.mark.parametrize(
    ("mean_accepted", "num_drafted", "advised"),
    [(3, 10, 4), (0, 5, 1), (0.2, 1, 1), (2.6, 5, 4), (4.4, 5, 5), (4.5, 5, 10), (1, 1, 2)],
)
def test_advised_draft_length(mean_accepted, num_drafted, advised):
    assert advised_draft_length(mean_accepted, num_drafted) == advised


@pytest.mark.parametrize(("mean", "num"), [(-0.1, 3), (3.1, 3), (0, 0), (math.nan, 3)])
def test_what_cannot_have_been_seen(mean, num):
    with pytest.raises(ValueError, match="mean_accepted"):
        advised_draft_length(mean, num)


LINEAR = Costs(lambda tokens: 0.010 + 0.001 * tokens, lambda requests: 0.001 + 0.0001 * requests)
STAIRS = Costs(lambda tokens: 0.005 * math.ceil(tokens / 16), lambda requests: 0.001)
OUTLOOK = np.array([0.05, 0.3, 0.6, 0.8, 0.9, 0.99])


def constant_thresholds(reach, length):
    """Draft on from the same probability on, however many draft and may still be drawn."""
    return lambda threshold: np.full((64, length + 1), reach)


def promise_of(point, *given):
    """Of one way alone."""
    return promises([point], *given)[0]


def simulated_goodput(point, num_requests, costs, from_reach, outlook, num_steps, seed=0):
    """Tokens per second, and tokens in a target pass, of many steps of many requests."""
    random = np.random.default_rng(seed)
    tokens = seconds = size = 0.0
    for _ in range(num_steps):
        going = [1.0] * num_requests
        verified = 0
        for _ in range(point.max_length):
            if point.threshold:
                going = [reach for reach in going if reach >= from_reach]
            if not going:
                break
            seconds += costs.draft(len(going))
            going = [reach * random.choice(outlook) for reach in going]
            if point.threshold:
                going = [reach for reach in going if reach >= point.threshold]
            verified += len(going)
            tokens += sum(going)
        seconds += costs.target(num_requests + verified)
        tokens += num_requests
        size += num_requests + verified
    return tokens / seconds, size / num_steps


class TestPromisedGoodput:
    @pytest.mark.parametrize("num_requests", [1, 7, 32])
    @pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 0.75])
    @pytest.mark.parametrize(("costs", "tolerance"), [(LINEAR, 0.02), (STAIRS, 0.05)])
    def test_is_what_a_simulation_gains(self, num_requests, threshold, costs, tolerance):
        point = OperatingPoint(4, threshold)
        drafts = np.array(list(itertools.product(OUTLOOK, repeat=4)))
        traces = Traces(drafts, drafts)
        promised = promise_of(point, num_requests, traces, costs, constant_thresholds(0.45, 4))
        simulated = simulated_goodput(
            point, num_requests, costs, 0.45, OUTLOOK, 4000 // num_requests + 300
        )
        assert (promised.goodput, promised.size) == pytest.approx(simulated, rel=tolerance)

    def test_expectations_decide_and_acceptance_counts(self):
        """A threshold keeps what is expected to be kept and gains what is."""
        traces = Traces(np.array([[0.9, 0.9], [0.2, 0.9]]), np.array([[0.5, 0.4], [1.0, 1.0]]))
        kept = promise_of(OperatingPoint(2, 0.5), 2, traces, LINEAR, constant_thresholds(0.5, 2))
        assert kept.tokens == pytest.approx(2 * (1 + (0.5 + 0.5 * 0.4) / 2))
        assert kept.size == 2 * (1 + (2 + 0) / 2)
        everything = promise_of(OperatingPoint(2), 2, traces, LINEAR, constant_thresholds(0.5, 2))
        assert everything.tokens == pytest.approx(2 * (1 + (0.5 + 0.2 + 1 + 1) / 2))

    def test_ways_do_not_meet(self):
        """Each promises beside others what it promises alone."""
        drafts = np.random.default_rng(0).random((40, 5))
        given = 6, Traces(drafts, drafts[::-1]), STAIRS, constant_thresholds(0.3, 5)
        points = [
            OperatingPoint(*each) for each in [(0,), (3,), (5,), (5, 0.2), (4, 0.6), (2, 0.9)]
        ]
        assert promises(points, *given) == [promise_of(point, *given) for point in points]

    @property_test
    @given(st.floats(0.0, 1.0), st.integers(0, 6), st.integers(1, 40))
    def test_static_lengths_in_closed_form(self, acceptance, length, num_requests):
        traces = imagined(np.array([acceptance]), 6, 256)
        for costs in (LINEAR, STAIRS):
            promise = promise_of(
                OperatingPoint(length), num_requests, traces, costs, constant_thresholds(0.0, 6)
            )
            tokens = num_requests * (1 + expected_accepted(acceptance, length))
            seconds = length * costs.draft(num_requests) + costs.target(num_requests * (1 + length))
            assert promise.size == num_requests * (1 + length)
            assert promise.tokens == pytest.approx(tokens)
            assert promise.seconds == pytest.approx(seconds)
            assert promise.goodput == pytest.approx(tokens / seconds)

    def best(self, outlook, num_requests, costs):
        """The best static length and the best threshold, as goodput and point."""
        traces = imagined(outlook, 5, 256)
        goodput = num_requests / costs.target(num_requests)

        def thresholds(threshold):
            draft_prices = [goodput * costs.draft(n) / n for n in [1, *range(1, num_requests + 1)]]
            return worth_drafting(outlook, threshold, np.array(draft_prices), 5)

        def promise(point):
            return promise_of(point, num_requests, traces, costs, thresholds).goodput, point

        by = partial(max, key=lambda each: each[0])
        return (
            by(promise(OperatingPoint(length)) for length in range(6)),
            by(promise(OperatingPoint(5, threshold)) for threshold in (0.1, 0.3, 0.5, 0.7, 0.9)),
        )

    @pytest.mark.parametrize("num_requests", [2, 8, 32])
    def test_signals_that_tell_everything_beat_every_static_length(self, num_requests):
        static, selected = self.best(np.array([0.0, 1.0]), num_requests, LINEAR)
        assert selected[0] > static[0] * (1.005 if num_requests > 8 else 1.05)

    @pytest.mark.parametrize("num_requests", [1, 16])
    def test_signals_that_tell_nothing_do_not(self, num_requests):
        static, selected = self.best(np.array([0.6]), num_requests, LINEAR)
        assert selected[0] <= static[0] * (1 + 1e-9)

    @pytest.mark.parametrize("num_requests", [1, 16])
    @pytest.mark.parametrize(
        "costs",
        [
            Costs(LINEAR.target, lambda requests: 0.1 + 0.01 * requests),
            Costs(lambda tokens: 0.010 * tokens, lambda requests: 0.001 * requests),
        ],
        ids=["draft", "verification"],
    )
    def test_where_passes_are_dear_nothing_is_drafted(self, num_requests, costs):
        static, selected = self.best(np.array([0.2, 0.4, 0.6]), num_requests, costs)
        assert static[1].max_length == 0
        assert selected[0] <= static[0] * (1 + 1e-9)


class TestOutlook:
    @property_test
    @given(
        st.lists(st.tuples(probabilities, st.floats(0.0, 1.0)), min_size=1, max_size=30),
        st.integers(1, 40),
    )
    def test_values_are_means_of_equal_parts(self, seen, count):
        predictions, weights = np.array(seen).T
        outlook = Outlook(forgetting=1.0)
        before = outlook.values(1)[0]
        outlook.observe(predictions, weights)
        values = outlook.values(count)
        assert values.shape == (count,)
        assert (np.diff(values) >= -1e-9).all()
        assert values.min() >= 0
        assert values.max() <= 1 + 1e-9
        # What it began with weighs as much as 20 tokens.
        mean = (20 * before + (predictions * weights).sum()) / (20 + weights.sum())
        assert values.mean() == pytest.approx(mean)

    @pytest.mark.parametrize("guess", [0.1, 0.6, 0.9])
    def test_it_begins_around_its_guess(self, guess):
        assert Outlook(guess).values().mean() == pytest.approx(guess, abs=0.1)

    def test_it_finds_the_quantiles(self):
        random = np.random.default_rng(0)
        seen = random.beta(2, 1, 20_000)
        outlook = Outlook(forgetting=1.0)
        outlook.observe(seen, np.ones_like(seen))
        parts = np.array_split(np.sort(seen), 16)
        expected = [part.mean() for part in parts]
        assert outlook.values() == pytest.approx(expected, abs=0.02)

    def test_it_forgets(self):
        outlook = Outlook(forgetting=0.99)
        for each, share in ((0.9, 1.0), (0.1, 0.5)):
            for _ in range(1000):
                outlook.observe(np.full(2, each), np.full(2, share))
        assert outlook.values().mean() == pytest.approx(0.1, abs=1e-3)

    def test_what_is_never_reached_changes_nothing(self):
        outlook = Outlook()
        before = outlook.values()
        outlook.observe(np.full(10_000, 0.9), np.zeros(10_000))
        outlook.observe(np.zeros(0), np.zeros(0))
        assert np.array_equal(outlook.values(), before)
