"""Costs of passes: the profiled curve, and its online correction when the machine changes."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost

from ..refusals import error_of

# Flat for a few tokens, then linear, as matrix products are.
CURVE = StageCost(
    (1, 2, 4, 8, 16, 32, 64, 128, 256),
    (0.016, 0.017, 0.018, 0.024, 0.034, 0.055, 0.092, 0.18, 0.34),
    6e-6,
)
DRAFT = StageCost((1, 8, 32), (0.001, 0.0015, 0.004))
SIZES = (1, 2, 3, 6, 8, 12, 24, 48, 96, 192)
NOISE = 0.1

CHANGES = {
    "none": lambda n, context: CURVE(n, context),
    "half": lambda n, context: 0.5 * CURVE(n, context),
    "double": lambda n, context: 2 * CURVE(n, context),
    "tenfold": lambda n, context: 10 * CURVE(n, context),
    "more per pass": lambda n, context: CURVE(n, context) + CURVE(1),
    "more per token": lambda n, context: CURVE(n, context) + 0.001 * n,
}


def drift(model):
    """Corrected over profiled time of a pass over eight tokens."""
    return model.target_seconds(8) / CURVE(8)


def follow(change, sizes, num_steps=300, seed=0):
    """A latency model after noisy observations of a changed machine."""
    generator = random.Random(seed)
    model = LatencyModel(CURVE)
    for _ in range(num_steps):
        n, context = generator.choice(sizes), generator.randrange(2000)
        noise = generator.lognormvariate(0, NOISE)
        model.observe_target(n, context, CHANGES[change](n, context) * noise)
    return model


def marginal(model, n):
    """Seconds of one more token in the target's pass."""
    more = max(1.0, n / 4)
    return (model.target_seconds(n + more) - model.target_seconds(n)) / more


def true_marginal(change, n):
    window = max(1.0, n / 4)
    return (CHANGES[change](n + window, 0) - CHANGES[change](n, 0)) / window


INVALID = [
    ((), ()),
    ((1, 2), (0.1,)),
    ((2, 1), (0.1, 0.2)),
    ((1, 1), (0.1, 0.2)),
    ((0, 1), (0.1, 0.2)),
    ((1, 2), (0.2, 0.1)),
    ((1,), (-0.1,)),
    ((1,), (math.nan,)),
    ((1, 2), (0.1, math.inf)),
    ((1, 2), (0.1, 0.2), -1e-6),
    ((1, 2), (0.1, 0.2), math.nan),
    ((1, 2), (0.1, 0.2), 0.0, -1e-6),
    ((1, 2), (0.1, 0.2), 0.0, math.inf),
]


class TestStageCost:
    def test_linear_between_measured_sizes(self):
        assert CURVE(12) == pytest.approx(0.029)
        assert CURVE(8) == 0.024

    def test_constant_below_the_smallest_size_and_zero_without_tokens(self):
        cost = StageCost((4, 8), (0.01, 0.02))
        assert cost(1) == 0.01
        assert cost(0, 100) == 0.0

    def test_extrapolated_with_the_slope_of_the_upper_half(self):
        assert CURVE(512) == pytest.approx(0.34 + 256 * (0.34 - 0.18) / 128)
        level_end = StageCost((16, 32, 64, 80), (1.0, 2.0, 4.0, 4.0))
        assert level_end(128) == pytest.approx(4.0 + 48 * 2.0 / 48)
        assert StageCost((4,), (0.01,))(1000) == 0.01

    def test_context_adds_time(self):
        assert CURVE(8, 1000) == pytest.approx(0.03)

    def test_round_trip_through_a_file(self):
        assert StageCost.from_dict(CURVE.to_dict()) == CURVE

    def test_refuses_invalid_curves(self):
        for values in INVALID:
            names = r"tokens must be ascending|per_context_token|first_extra"
            error_of(StageCost, *values, error=ValueError, match=names)

    def test_a_mean_over_passes_is_split_into_the_first_and_the_others(self):
        cost = StageCost((1, 8), (0.002, 0.003)).split(0.004, 4)
        assert cost.seconds == pytest.approx((0.001, 0.002))
        assert cost.first_extra == 0.004
        assert cost.first_extra + 4 * cost(8) == pytest.approx(4 * 0.003)
        assert StageCost.from_dict(cost.to_dict()) == cost
        # Whatever the noise of its measurement, a pass takes some time, and all together as much
        # as was measured.
        noisy = StageCost((1, 8), (0.002, 0.003)).split(0.1, 4)
        assert noisy.seconds == pytest.approx((0.0002, 0.0012))
        assert noisy.first_extra + 4 * noisy(1) == pytest.approx(4 * 0.002)

    def test_older_files_have_no_first_pass(self):
        values = CURVE.to_dict()
        del values["first_extra"]
        assert StageCost.from_dict(values) == CURVE


class TestLiveCorrection:
    def test_equals_the_profile_before_any_step(self):
        model = LatencyModel(CURVE, DRAFT, DRAFT)
        for n in (1, 5, 24, 300):
            assert model.target_seconds(n, 500) == pytest.approx(CURVE(n, 500))
            assert model.draft_seconds(n) == pytest.approx(DRAFT(n))
            assert model.companion_seconds(n) == pytest.approx(DRAFT(n))
        assert drift(model) == pytest.approx(1.0)

    @pytest.mark.parametrize("change", CHANGES)
    def test_follows_a_changed_machine_at_every_size(self, change):
        model = follow(change, SIZES)
        for n in (1, 4, 8, 32, 192):
            assert model.target_seconds(n, 1000) == pytest.approx(CHANGES[change](n, 1000), rel=0.1)
            assert marginal(model, n) == pytest.approx(true_marginal(change, n), rel=0.15)

    @pytest.mark.parametrize("size", [1, 8, 32, 192])
    @pytest.mark.parametrize("change", ["half", "double"])
    def test_steps_of_one_size_move_the_whole_curve(self, change, size):
        model = follow(change, [size])
        for n in (1, 8, 32, 192):
            assert model.target_seconds(n) == pytest.approx(CHANGES[change](n, 0), rel=0.1)
            assert marginal(model, n) == pytest.approx(true_marginal(change, n), rel=0.1)

    @pytest.mark.parametrize("size", [1, 8, 32, 192])
    @pytest.mark.parametrize("change", ["more per pass", "more per token"])
    def test_steps_of_one_size_keep_the_curve_plausible_elsewhere(self, change, size):
        """One size cannot determine the whole curve, but the curve must remain plausible."""
        model = follow(change, [size])
        assert model.target_seconds(size, 1000) == pytest.approx(
            CHANGES[change](size, 1000), rel=0.1
        )
        for n in (1, 8, 32, 192):
            assert 0.5 < model.target_seconds(n) / CHANGES[change](n, 0) < 2
            assert 0.4 < marginal(model, n) / true_marginal(change, n) < 2.5

    def test_returns_when_the_machine_recovers(self):
        model = follow("double", SIZES)
        assert drift(model) > 1.8
        for step in range(300):
            n = SIZES[step % len(SIZES)]
            model.observe_target(n, 0, CURVE(n))
        assert drift(model) == pytest.approx(1.0, rel=0.03)

    @given(
        st.lists(
            st.tuples(
                st.integers(0, 400),
                st.integers(0, 100_000),
                st.floats(allow_nan=True, allow_infinity=True),
            ),
            max_size=60,
        )
    )
    @settings(deadline=None, max_examples=60)
    def test_stays_positive_and_increasing_for_any_observations(self, steps):
        model = LatencyModel(CURVE, DRAFT, DRAFT)
        for n, context, seconds in steps:
            model.observe_target(n, context, seconds)
            model.observe_draft([n, n // 2, 0], seconds)
            model.observe_companion(n, seconds)
        for seconds in (model.target_seconds, model.draft_seconds, model.companion_seconds):
            curve = [seconds(n) for n in range(1, 600, 7)]
            assert all(0 < value < math.inf for value in curve)
            assert all(a <= b for a, b in pairwise(curve))
        assert all(0 <= marginal(model, n) < math.inf for n in (1, 8, 64, 600))

    def test_ignores_invalid_times(self):
        for seconds in [math.nan, math.inf, -math.inf, 0.0, -1.0]:
            model = LatencyModel(CURVE, DRAFT, DRAFT)
            model.observe_target(8, 100, seconds)
            model.observe_draft([8, 4], seconds)
            model.observe_companion(8, seconds)
            assert model.target_seconds(8) == CURVE(8), seconds
            assert model.draft_seconds(8) == DRAFT(8), seconds
            assert model.companion_seconds(8) == DRAFT(8), seconds

    def test_ignores_steps_without_tokens(self):
        model = LatencyModel(CURVE, DRAFT, DRAFT)
        model.observe_target(0, 0, 1.0)
        model.observe_draft([], 1.0)
        model.observe_draft([0, 0], 1.0)
        model.observe_companion(0, 1.0)
        assert drift(model) == pytest.approx(1.0)
        assert model.draft_seconds(8) == DRAFT(8)
        assert model.companion_seconds(8) == DRAFT(8)

    def test_one_pause_has_little_effect(self):
        model = follow("none", SIZES)
        before = model.target_seconds(8)
        model.observe_target(8, 0, 1000.0)
        assert model.target_seconds(8) < 1.1 * before

    def test_draft_time_is_divided_between_the_passes(self):
        model = LatencyModel(CURVE, DRAFT)
        for step in range(300):
            counts = [8, 6, 1] if step % 2 else [32, 20]
            model.observe_draft(counts, sum(3 * DRAFT(count) for count in counts))
        for n in (1, 8, 32):
            assert model.draft_seconds(n) == pytest.approx(3 * DRAFT(n), rel=0.05)

    def test_the_first_pass_of_a_step_takes_longer(self):
        first = replace(DRAFT, first_extra=0.01)
        model = LatencyModel(CURVE, first)
        assert model.first_draft_extra == 0.01
        for step in range(300):
            counts = [8, 6, 1] if step % 2 else [32]
            model.observe_draft(counts, 2 * (0.01 + sum(map(DRAFT, counts))))
        assert model.first_draft_extra == pytest.approx(0.02, rel=0.05)
        for n in (1, 8, 32):
            assert model.draft_seconds(n) == pytest.approx(2 * DRAFT(n), rel=0.1)
        assert model.drafting_seconds([]) == model.drafting_seconds([0, 0]) == 0.0
        passes = model.draft_seconds(8) + model.draft_seconds(3)
        assert model.drafting_seconds([8, 3, 0]) == passes + model.first_draft_extra

    def test_companion_cost_is_corrected(self):
        model = LatencyModel(CURVE, None, DRAFT)
        for step in range(300):
            n = SIZES[step % len(SIZES)]
            model.observe_companion(n, 2 * DRAFT(n))
        assert model.companion_seconds(8) == pytest.approx(2 * DRAFT(8), rel=0.05)

    def test_absent_models_cost_nothing(self):
        model = LatencyModel(CURVE)
        model.observe_draft([4], 1.0)
        model.observe_companion(4, 1.0)
        assert model.draft_seconds(8) == model.companion_seconds(8) == 0.0
        assert model.first_draft_extra == 0.0
