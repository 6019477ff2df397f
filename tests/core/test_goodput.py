"""Step estimates, draft memory and step-time corrections, against simulations and formulas."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.goodput import (
    Costs,
    DraftMemory,
    OperatingPoint,
    StepTimeCorrections,
    advised_draft_length,
    expected_accepted,
    step_estimates,
)

property_test = settings(deadline=None, derandomize=True, max_examples=60)
probabilities = st.floats(0.0, 1.0)


@property_test
@given(probabilities, st.integers(0, 8))
def test_expected_accepted_equals_the_sum_over_all_outcomes(acceptance, num_tokens):
    """Each combination of accepted and rejected tokens counts by its probability."""
    expected = 0.0
    for kept in itertools.product([True, False], repeat=num_tokens):
        probability = math.prod(acceptance if each else 1 - acceptance for each in kept)
        expected += probability * len(list(itertools.takewhile(bool, kept)))
    assert expected_accepted(acceptance, num_tokens) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("mean_accepted", "num_drafted", "advised"),
    [(3, 10, 4), (0, 5, 1), (0.2, 1, 1), (2.6, 5, 4), (4.4, 5, 5), (4.5, 5, 10), (1, 1, 2)],
)
def test_advised_draft_length(mean_accepted, num_drafted, advised):
    assert advised_draft_length(mean_accepted, num_drafted) == advised


@pytest.mark.parametrize(("mean", "num"), [(-0.1, 3), (3.1, 3), (0, 0), (math.nan, 3)])
def test_impossible_statistics_are_refused(mean, num):
    with pytest.raises(ValueError, match="mean_accepted"):
        advised_draft_length(mean, num)


LINEAR = Costs(lambda tokens: 0.010 + 0.001 * tokens, lambda requests: 0.001 + 0.0001 * requests)
STAIRS = Costs(lambda tokens: 0.005 * math.ceil(tokens / 16), lambda requests: 0.001)
VALUES = np.array([0.05, 0.3, 0.6, 0.8, 0.9, 0.99])


def estimate(point, num_requests, expected, acceptance, costs):
    """The step estimate of one operating point."""
    return step_estimates([point], num_requests, expected, acceptance, costs)[0]


def simulated_goodput(point, num_requests, costs, values, num_steps):
    """Tokens per second and tokens per target pass, over many simulated steps."""
    random = np.random.default_rng(0)
    tokens = seconds = size = 0.0
    for _ in range(num_steps):
        active, verified = [1.0] * num_requests, 0
        for _ in range(point.max_length):
            if not active:
                break
            seconds += costs.draft(len(active))
            drafted = [probability * random.choice(values) for probability in active]
            active = [probability for probability in drafted if probability >= point.threshold]
            chosen = drafted if point.verifies_all else active
            verified += len(chosen)
            tokens += sum(chosen)
        seconds += costs.target(num_requests + verified)
        tokens += num_requests
        size += num_requests + verified
    return tokens / seconds, size / num_steps


class TestStepEstimates:
    @pytest.mark.parametrize("num_requests", [1, 7, 32])
    @pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 0.75])
    @pytest.mark.parametrize("verifies_all", [False, True])
    def test_estimates_equal_a_simulation(self, num_requests, threshold, verifies_all):
        point = OperatingPoint(4, threshold, verifies_all)
        drafts = np.array(list(itertools.product(VALUES, repeat=4)))
        estimated = estimate(point, num_requests, drafts, drafts, LINEAR)
        num_steps = 4000 // num_requests + 300
        simulated = simulated_goodput(point, num_requests, LINEAR, VALUES, num_steps)
        assert (estimated.goodput, estimated.size) == pytest.approx(simulated, rel=0.02)

    def test_predictions_select_tokens_and_acceptance_gives_the_gain(self):
        """The threshold applies to the predictions, the gain to the acceptance probabilities."""
        drafts = np.array([[0.9, 0.9], [0.2, 0.9]]), np.array([[0.5, 0.4], [1.0, 1.0]])
        kept = estimate(OperatingPoint(2, 0.5), 2, *drafts, LINEAR)
        assert kept.tokens == pytest.approx(2 * (1 + (0.5 + 0.5 * 0.4) / 2))
        assert kept.size == 2 * (1 + (2 + 0) / 2)
        everything = estimate(OperatingPoint(2), 2, *drafts, LINEAR)
        assert everything.tokens == pytest.approx(2 * (1 + (0.5 + 0.2 + 1 + 1) / 2))
        drafted = estimate(OperatingPoint(2, 0.5, verifies_all=True), 2, *drafts, LINEAR)
        assert drafted.tokens == pytest.approx(2 * (1 + (0.5 + 0.2 + 1) / 2))
        assert drafted.size == 2 * (1 + (2 + 1) / 2)
        assert drafted.passes == kept.passes

    def test_a_step_that_drafts_has_one_first_pass(self):
        drafts = np.full((4, 3), 0.5), np.full((4, 3), 0.5)
        costs = replace(LINEAR, first_draft_extra=0.25)
        for point, extra in (
            (OperatingPoint(0), 0.0),
            (OperatingPoint(1), 0.25),
            (OperatingPoint(3), 0.25),
            (OperatingPoint(3, 0.4), 0.25),
        ):
            without = estimate(point, 2, *drafts, LINEAR).seconds
            assert estimate(point, 2, *drafts, costs).seconds == pytest.approx(without + extra)

    def test_points_are_estimated_independently(self):
        drafts = np.random.default_rng(0).random((40, 5))
        given = 6, drafts, drafts[::-1], STAIRS
        points = [
            OperatingPoint(*each)
            for each in [(0,), (3,), (5,), (5, 0.2), (5, 0.2, True), (4, 0.6), (2, 0.9)]
        ]
        assert step_estimates(points, *given) == [estimate(point, *given) for point in points]

    @property_test
    @given(st.floats(0.0, 1.0), st.integers(0, 6), st.integers(1, 40))
    def test_fixed_lengths_equal_the_closed_form(self, acceptance, length, num_requests):
        drafts = np.full((8, 6), acceptance)
        for costs in (LINEAR, STAIRS):
            made = estimate(OperatingPoint(length), num_requests, drafts, drafts, costs)
            tokens = num_requests * (1 + expected_accepted(acceptance, length))
            seconds = length * costs.draft(num_requests) + costs.target(num_requests * (1 + length))
            assert made.size == num_requests * (1 + length)
            assert made.tokens == pytest.approx(tokens)
            assert made.seconds == pytest.approx(seconds)
            assert made.goodput == pytest.approx(tokens / seconds)


class TestDraftMemory:
    @pytest.mark.parametrize("guess", [0.1, 0.6, 0.9])
    def test_synthetic_drafts_have_the_mean_of_the_guess(self, guess):
        memory = DraftMemory(256, 5, guess)
        assert memory.expected.mean() == pytest.approx(guess, abs=0.01)
        assert np.array_equal(memory.expected, memory.acceptance)

    def test_recorded_drafts_are_not_changed(self):
        memory, random = DraftMemory(6, 3, 0.5), np.random.default_rng(0)
        expected, acceptance = random.random((2, 6, 3))
        memory.observe(expected, acceptance, np.full(6, 3))
        memory.complete()
        assert np.array_equal(memory.expected, expected)
        assert np.array_equal(memory.acceptance, acceptance)

    def test_the_oldest_drafts_are_replaced(self):
        memory = DraftMemory(4, 1, 0.5)
        for value in (0.1, 0.2, 0.3):
            memory.observe(np.full((3, 1), value), np.full((3, 1), value), np.array([1, 0, 1]))
        memory.complete()
        assert sorted(memory.expected[:, 0]) == [0.2, 0.2, 0.3, 0.3]

    def test_short_drafts_are_extended_like_the_others(self):
        memory, random = DraftMemory(2000, 3, 0.5), np.random.default_rng(0)
        values = random.choice([0.3, 0.9], (2000, 3))
        lengths = random.choice([1, 3], 2000)
        memory.observe(values, values, lengths)
        memory.complete()
        known = np.arange(3) < lengths[:, None]
        assert np.array_equal(memory.expected[known], values[known])
        synthetic = memory.expected[~known]
        assert set(synthetic.tolist()) <= {0.3, 0.9}
        # Each token is weighted by the probability that it is reached.
        weight = np.cumprod(np.hstack([np.ones((2000, 1)), values[:, :-1]]), axis=1)[known]
        share = weight[values[known] > 0.5].sum() / weight.sum()
        assert (synthetic > 0.5).mean() == pytest.approx(share, abs=0.03)

    def test_a_draft_length_of_zero(self):
        memory = DraftMemory(4, 0, 0.6)
        memory.observe(np.zeros((2, 0)), np.zeros((2, 0)), np.zeros(2, dtype=np.int64))
        memory.complete()
        assert memory.expected.shape == (4, 0)


class TestStepTimeCorrections:
    SHORT, LONG, NONE = OperatingPoint(1), OperatingPoint(5), OperatingPoint(0)
    SELECTING, SAME_KIND = OperatingPoint(5, 0.3), OperatingPoint(5, 0.5)

    def factors(self, *runs):
        """Factors of all points after runs of ``(point, steps, ratio)``.

        The point of the first run is the incumbent.
        """
        corrections, step = StepTimeCorrections(8, 512), 0
        points = [self.SHORT, self.LONG, self.NONE, self.SELECTING, self.SAME_KIND]
        for point, num_steps, ratio in runs:
            for _ in range(num_steps):
                step += 1
                corrections.observe(step, point, ratio, point == runs[0][0])
            corrections.update(step, points, runs[0][0])
        return {point: corrections.factor(point) for point in points}

    def test_a_slower_machine_affects_all_points(self):
        factors = self.factors((self.SHORT, 60, 1.4))
        assert list(factors.values()) == pytest.approx([1.4] * 5)

    def test_each_point_has_its_own_correction(self):
        few = self.factors((self.SHORT, 60, 1.0), (self.LONG, 4, 1.2))
        many = self.factors((self.SHORT, 60, 1.0), (self.LONG, 100, 1.2))
        assert 1.02 < few[self.LONG] / few[self.SHORT] < 1.12
        assert 1.15 < many[self.LONG] / many[self.SHORT] < 1.22

    def test_a_trial_is_compared_with_the_current_pace(self):
        factors = self.factors(
            (self.SHORT, 100, 1.0), (self.SHORT, 20, 1.25), (self.LONG, 12, 1.25)
        )
        assert factors[self.LONG] == pytest.approx(factors[self.SHORT], rel=0.02)

    def test_points_learn_only_from_points_of_their_kind(self):
        factors = self.factors((self.SHORT, 60, 1.0), (self.SELECTING, 40, 1.2))
        assert factors[self.SAME_KIND] > 1.1
        assert factors[self.NONE] == pytest.approx(1.0)
