"""The choice of the operating point, its reviews, and the effect of step times."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from draftwise.core.goodput import OperatingPoint, point_kind
from draftwise.core.stage_cost import StageCost
from draftwise.policies.pricing import Price, Pricing
from draftwise.policies.pricing_options import PricingOptions

from ..stand_ins import FixedLatency

INFORMATIVE = [0.02, 0.05, 0.98, 0.99, 0.99, 0.99]
ORDINARY = [0.2, 0.4, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99]
FLAT = StageCost((1, 4096), (0.010, 0.0101))
LINEAR = StageCost((1, 2, 4096), (0.010, 0.011, 4.105))
DRAFT = StageCost((1, 4096), (0.0008, 0.002))
SLOW_START = replace(DRAFT, first_extra=0.004)


def pricing_for(target, values, gamma=6, draft=DRAFT, **options):
    """Pricing with recorded drafts of independent tokens."""
    made = Pricing(FixedLatency(target, draft), gamma, PricingOptions(**options))
    count = made.options.memory
    drafts = np.random.default_rng(0).choice(values, (count, gamma))
    made.drafts.observe(drafts, drafts, np.full(count, gamma))
    return made


def simulated(made, point, num_requests, values, num_steps=1500):
    """Tokens per second of an operating point in a simulation."""
    random = np.random.default_rng(0)
    costs = made._latency
    tokens = seconds = 0.0
    for _ in range(num_steps):
        active, verified = [1.0] * num_requests, 0
        for _ in range(point.max_length):
            if not active:
                break
            seconds += costs.draft_seconds(len(active))
            drafted = [probability * random.choice(values) for probability in active]
            active = [probability for probability in drafted if probability >= point.threshold]
            chosen = drafted if point.verifies_all else active
            verified += len(chosen)
            tokens += sum(chosen)
        seconds += costs.target_seconds(num_requests + verified)
        tokens += num_requests
    return tokens / seconds


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [1, 3, 16])
@pytest.mark.parametrize("values", [INFORMATIVE, ORDINARY], ids=["informative", "ordinary"])
@pytest.mark.parametrize("target", [FLAT, LINEAR], ids=["flat", "linear"])
def test_the_point_with_the_best_goodput_is_chosen(target, values, num_requests):
    made = pricing_for(target, values)
    price = made.price(num_requests, 0)
    steps = 1500 // num_requests
    goodput = simulated(made, price.point, num_requests, values, steps)
    assert price.goodput == pytest.approx(goodput, rel=0.1)
    points = [OperatingPoint(length) for length in range(7)]
    points += [OperatingPoint(6, threshold) for threshold in (0.1, 0.3, 0.5, 0.8)]
    points += [OperatingPoint(6, threshold, True) for threshold in (0.1, 0.3, 0.5, 0.8)]
    others = [simulated(made, each, num_requests, values, steps) for each in points]
    assert goodput >= 0.95 * max(others)


def test_a_step_that_drafts_has_one_first_pass():
    plain, made = pricing_for(FLAT, [0.8]), pricing_for(FLAT, [0.8], draft=SLOW_START)
    for pricing in (plain, made):
        pricing.price(3, 0)
    estimates = [p._estimates(3, 0) for p in (plain, made)]
    for point, estimate in estimates[1].items():
        extra = estimate.seconds - estimates[0][point].seconds
        assert extra == pytest.approx(0.004 if point.max_length else 0.0)
    for drafted, extra in (((0, 0, 0), 0.0), ((0, 1, 0), 0.004), ((4, 2, 0), 0.004)):
        seconds = [p.work_seconds(drafted, drafted) for p in (plain, made)]
        assert seconds[1] - seconds[0] == pytest.approx(extra)


def test_a_draft_without_cost_drafts_to_the_maximum_length():
    free = StageCost((1,), (1e-6,))
    assert pricing_for(FLAT, [0.8], draft=free).price(1, 0).point == OperatingPoint(6)


@pytest.mark.parametrize("num_requests", [1, 20])
def test_an_expensive_draft_is_not_used(num_requests):
    expensive = StageCost((1, 100), (0.1, 0.2))
    price = pricing_for(LINEAR, ORDINARY, draft=expensive).price(num_requests, 0)
    assert price.point.max_length == 0
    assert price.goodput == pytest.approx(num_requests / LINEAR(num_requests))
    assert price.verify == pytest.approx(price.goodput * 0.001, rel=0.01)


def test_informative_signals_lead_to_a_threshold():
    price = pricing_for(LINEAR, INFORMATIVE).price(8, 0)
    assert price.point.threshold > 0


def test_a_drafted_token_is_verified_where_verification_is_free():
    """The last token of a draft that stopped is unlikely, but its pass has been made."""
    slow = StageCost((1, 64), (0.003, 0.003))
    free = pricing_for(StageCost((1, 256), (0.010, 0.010)), INFORMATIVE, draft=slow).price(1, 0)
    assert free.point.threshold > 0
    assert free.point.verifies_all
    costly = pricing_for(StageCost((1, 256), (0.010, 2.0)), INFORMATIVE, draft=slow).price(8, 0)
    assert not costly.point.verifies_all


def test_a_step_in_the_cost_does_not_stop_the_choice():
    """One more token costs as much as seven more tokens."""
    stair = StageCost((1, 1.01, 8), (0.010, 0.018, 0.018))
    cheap = StageCost((1,), (1e-4,))
    made = pricing_for(stair, [0.9], gamma=7, draft=cheap)
    assert made.price(1, 0).point == OperatingPoint(7)


def test_a_maximum_draft_length_of_zero():
    assert Pricing(FixedLatency(LINEAR, DRAFT), 0).price(4, 0).point == OperatingPoint(0)


def test_each_batch_size_has_its_own_choice():
    made = pricing_for(LINEAR, ORDINARY)
    goodput = [made.price(num_requests, 0).goodput for num_requests in (1, 2, 7, 8, 30)]
    assert goodput == sorted(set(goodput))
    assert made.price(30, 0) is made.price(30, 0)
    assert made.price(65, 0) is made.price(64, 0)


@pytest.mark.parametrize("near", [6, 9])
def test_a_new_batch_size_begins_with_the_nearest_known_one(near):
    """Steps with a threshold are slow, which the latency model does not know."""
    reality = Reality(lambda point: 0.4 if point.threshold else 1.0)
    assert selects(reality.run(1))[0]
    reality.run(1500, num_requests=8)
    assert not any(selects(reality.run(20, num_requests=near)))
    assert selects(Reality(lambda point: 1.0).run(1, num_requests=near))[0]


def test_batch_sizes_with_few_steps_are_not_known():
    reality = Reality(lambda point: 0.4 if point.threshold else 1.0)
    assert selects(reality.run(5, num_requests=60))[0]
    reality.run(1500, num_requests=8)
    assert not any(selects(reality.run(5, num_requests=40)))


def test_a_new_batch_size_may_begin_with_another_point():
    """Only the corrections of a size apply to others, not its choice."""
    reality = Reality(lambda point: 1.0, StageCost((1, 4, 4096), (0.01, 0.0101, 4.0)), [0.9])
    assert reality.run(300, num_requests=1)[-1].max_length > 0
    assert reality.run(1, num_requests=64) == [OperatingPoint(0)]


def test_without_any_time_points_are_compared_by_the_latency_model():
    """Nothing can be learnt about a point on trial, so the others are not kept waiting for it."""
    made = pricing_for(LINEAR, ORDINARY)
    first = made.price(4, 0)
    drafts, prices = np.full((made.options.memory, 6), 0.05), []
    made.drafts.observe(drafts, drafts, np.full(len(drafts), 6))
    for _ in range(100):
        made.count_step(is_typical=False)
        prices.append(made.price(4, 0))
    assert first.point.max_length > 0
    assert not made.has_times(4)
    assert prices[-1].point.max_length == 0
    assert {price.point for price in prices} == {first.point, prices[-1].point}
    # Once there are times again, points that draft are tried, also after the text has changed.
    made.work_seconds = lambda *_: made.expected_seconds
    for acceptance, does_draft in ((0.05, False), (0.95, True)):
        made.drafts.observe(*[np.full(drafts.shape, acceptance)] * 2, np.full(len(drafts), 6))
        for _ in range(400):
            price = made.price(4, 0)
            made.count_step(is_typical=True)
            made.observe(made.expected_seconds, (), ())
        assert (price.point.max_length > 0) == does_draft


def test_pauses_between_reviews_double():
    made = pricing_for(LINEAR, ORDINARY, exploration_bonus=0.0)
    made.price(4, 0)
    (choice,) = made._choices.values()
    choice.tried.update(itertools.product([True, False], repeat=2))
    reviews = []
    review = made._review
    made._review = lambda choice, *rest: reviews.append(choice.num_steps) or review(choice, *rest)
    for _ in range(1099):
        made.price(4, 0)
    assert reviews == [*range(24, 265, 24), 312, 408, 600, 856]


def test_goodput_follows_costs():
    latency = FixedLatency(LINEAR, DRAFT)
    made = Pricing(latency, 4)
    before = made.price(2, 0)
    latency._target.stage = StageCost(LINEAR.tokens, tuple(3 * s for s in LINEAR.seconds))
    for _ in range(2 * made.options.trial_steps):
        after = made.price(2, 0)
    assert after.goodput < before.goodput / 2


class Reality:
    """A machine on which steps at some operating points take longer or shorter than estimated.

    Its pace may change over time, by a factor that depends on the number of the step.
    """

    def __init__(
        self,
        share,
        target=LINEAR,
        values=INFORMATIVE,
        noise=0.0,
        draft=DRAFT,
        pace=None,
        **options,
    ):
        self.pricing = pricing_for(target, values, draft=draft, **options)
        self.pricing.work_seconds = lambda *_: self.pricing.expected_seconds
        self.share = share
        self._pace = pace or (lambda _: 1.0)
        self._noise = np.random.default_rng(0), noise
        self._num_steps = 0

    def run(self, num_steps, num_requests=8):
        """Run steps, and return the operating point of each."""
        points = []
        random, noise = self._noise
        for _ in range(num_steps):
            point = self.pricing.price(num_requests, 0).point
            points.append(point)
            slower = math.exp(noise * random.standard_normal()) / self.share(point)
            slower *= self._pace(self._num_steps)
            self.pricing.observe(self.pricing.expected_seconds * slower, (), ())
            self._num_steps += 1
        return points

    @property
    def choice(self):
        (choice,) = self.pricing._choices.values()
        return choice


def selects(points):
    return [point.threshold > 0 for point in points]


def test_points_with_long_steps_are_abandoned():
    kinds = selects(Reality(lambda point: 0.4 if point.threshold else 1.0).run(1500))
    assert kinds[0]
    assert not all(kinds[:100])
    assert sum(kinds[500:]) < 0.06 * 1000


def test_corrected_goodput_equals_observed_goodput():
    reality = Reality(lambda point: 0.9 if point.threshold else 0.5)
    points = reality.run(1500)
    assert all(selects(points[-100:]))
    price = reality.pricing.price(8, 0)
    unbiased = Reality(lambda point: 1.0).pricing.price(8, 0)
    assert price.goodput == pytest.approx(0.9 * unbiased.goodput, rel=0.03)


@pytest.mark.parametrize("share", [0.85, 0.9])
@pytest.mark.parametrize("best", [0, 1, 2, 4])
def test_a_point_that_is_better_than_estimated_is_found(best, share):
    """All points have the same estimate, and one is faster than the others."""
    gained = [8 * sum(0.5**i for i in range(length + 1)) for length in range(7)]
    equal = StageCost((1, *range(8, 57, 8)), (0.010, *(0.002 * each for each in gained)))
    reality = Reality(
        lambda point: 1.0 if point == OperatingPoint(best) else share,
        equal,
        [0.5],
        noise=0.05,
        draft=StageCost((1, 4096), (1e-9, 1e-9)),
        num_thresholds=2,
    )
    used = reality.run(4000)[-1000:]
    assert used.count(OperatingPoint(best)) > 700


def test_trials_cost_little():
    reality = Reality(lambda point: 1.0, values=ORDINARY, noise=0.05)
    points = reality.run(3000)[500:]
    estimates = reality.choice.estimates
    used = [estimates[point] for point in points]
    goodput = sum(each.tokens for each in used) / sum(each.seconds for each in used)
    assert goodput > 0.98 * max(each.goodput for each in estimates.values())


@pytest.mark.parametrize("period", [40, 110, 300])
def test_a_change_of_the_machines_pace_does_not_change_the_choice(period):
    """Target-only steps are 10% faster than estimated. At times all steps take 50% longer."""
    reality = Reality(
        lambda point: 1.0 if point.max_length else 1.1,
        StageCost((1, 4096), (0.001, 4.096)),
        [0.9],
        noise=0.03,
        pace=lambda step: 1.0 + 0.5 * (step // period % 2),
    )
    used = reality.run(3000)[1000:]
    assert used.count(OperatingPoint(0)) > 1600


def test_the_incumbent_begins_and_takes_turns():
    reality = Reality(lambda point: 1.0, values=ORDINARY)
    while True:
        (first,) = reality.run(1)
        if reality.choice.challenger:
            break
    options = reality.pricing.options
    points = [first, *reality.run(options.trial_steps - 1)]
    incumbent, challenger = reality.choice.incumbent.point, reality.choice.challenger.point
    turn = [incumbent] * (options.trial_steps // 4) + [challenger] * (options.trial_steps // 4)
    assert points == turn * 2
    reality.run(1)
    assert reality.choice.challenger is None


def test_every_kind_is_tried_once_even_without_observed_times():
    made = pricing_for(LINEAR, ORDINARY, exploration_bonus=0.0)
    points = [made.price(4, 0).point for _ in range(1000)]
    for kind in ((False, False), (True, False), (True, True)):
        trial = made.options.trial_steps // 2
        assert [point_kind(point) for point in points].count(kind) in (trial, 1000 - 2 * trial)


def test_observed_times_are_divided_by_the_cost_of_the_passes():
    made = pricing_for(LINEAR, ORDINARY)
    price = made.price(4, 0)
    drafted, verified = (3, 0, 2, 1), (2, 0, 2, 1)
    seconds = LINEAR(4 + 5) + DRAFT(3) + DRAFT(2) + DRAFT(1)
    assert made.work_seconds(drafted, verified) == pytest.approx(seconds)
    seen = []
    (choice,) = made._choices.values()
    choice.corrections.observe = lambda *each: seen.append(each)
    made.observe(2 * seconds, drafted, verified)
    assert seen == [(1, price.point, pytest.approx(2.0), True)]


def test_a_point_that_was_slow_is_tried_again():
    shares = {True: 0.4, False: 1.0}
    reality = Reality(lambda point: shares[point.threshold > 0])
    assert sum(selects(reality.run(1000)[-50:])) <= reality.pricing.options.trial_steps
    shares[True] = 1.0
    assert all(selects(reality.run(4000)[-20:]))


def test_pauses_of_the_machine_are_ignored():
    reality = Reality(lambda point: 1.0, pace=lambda step: 500.0 if step % 50 == 30 else 1.0)
    first = reality.pricing.price(8, 0)
    reality.run(1500)
    price = reality.pricing.price(8, 0)
    assert price.point.threshold > 0
    assert price.goodput == pytest.approx(first.goodput, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_invalid_times_are_ignored(seconds):
    made = pricing_for(LINEAR, INFORMATIVE)
    before = made.price(8, 0)
    for _ in range(2 * made.options.trial_steps):
        price = made.price(8, 0)
        made.observe(seconds, (1,), (1,))
    assert price.goodput == pytest.approx(before.goodput)


def test_steps_that_were_not_priced_are_ignored():
    made = pricing_for(LINEAR, INFORMATIVE)
    made.observe(1.0, (1,), (1,))
    assert made.price(8, 0).goodput == pricing_for(LINEAR, INFORMATIVE).price(8, 0).goodput


def test_the_companions_price_is_its_seconds_times_goodput():
    latency = FixedLatency(LINEAR, DRAFT, StageCost((1, 11), (0.001, 0.011)))
    price = Price(OperatingPoint(3), 200.0, 0.0)
    assert Pricing(latency, 3).companion_price(price, 6) == pytest.approx(200 * 0.006)


def test_a_trial_of_a_point_that_is_much_worse_ends_early():
    """A few steps show it. A point that is not worse has the whole trial."""

    def tried(share):
        reality = Reality(lambda point: share if point.threshold == 0 else 1.0, noise=0.02)
        options = reality.pricing.options
        reality.run(options.trial_steps - 1)
        trial = reality.run(options.trial_steps)
        challenger = trial[options.trial_steps // 4]
        assert challenger.threshold == 0 < trial[0].threshold
        return trial.count(challenger)

    assert tried(0.3) == 3
    assert tried(2.0) == PricingOptions().trial_steps // 2
