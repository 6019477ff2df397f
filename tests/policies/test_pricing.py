"""Which way of running is chosen, when it is thought over, and what broken promises do."""

import math

import numpy as np
import pytest

from draftwise.core.goodput import OperatingPoint
from draftwise.core.latency import StageCost
from draftwise.policies import experience, pricing
from draftwise.policies.pricing import Price, PriceBook

from ..stand_ins import FixedLatency

INFORMATIVE = [0.02, 0.05, 0.98, 0.99, 0.99, 0.99]
ORDINARY = [0.2, 0.4, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99]
FLAT = StageCost((1, 4096), (0.010, 0.0101))
LINEAR = StageCost((1, 2, 4096), (0.010, 0.011, 4.105))
# Eight tokens cost as much as one, nine as much as sixteen.
STAIRS = StageCost(
    (1, *(edge for step in range(1, 40) for edge in (8 * step, 8 * step + 0.01))),
    (0.010, *(round(0.006 * step + more, 6) for step in range(1, 40) for more in (0.004, 0.01))),
)
DEAR = StageCost((1, 100), (0.1, 10.0))
DRAFT = StageCost((1, 4096), (0.0008, 0.002))


@pytest.fixture(autouse=True)
def selection_costs_nothing(monkeypatch):
    """What is expected of it before it is seen is put aside."""
    monkeypatch.setattr(experience, "_SELECTION_SECONDS", 0.0)
    monkeypatch.setattr(experience, "_SELECTION_SECONDS_EACH", 0.0)


def book_for(target, outlook, gamma=6, draft=DRAFT):
    book = PriceBook(FixedLatency(target, draft), gamma)
    for _ in range(100):
        book.outlook.observe(np.array(outlook), np.ones(len(outlook)))
    return book


def simulated(book, price, num_requests, outlook, num_steps=1500):
    """Tokens per second of a way of running, by running it."""
    random = np.random.default_rng(0)
    costs, point = book._latency, price.point
    thresholds = book.draft_thresholds(price, num_requests)
    tokens = seconds = 0.0
    for _ in range(num_steps):
        going, verified = [1.0] * num_requests, 0
        for place in range(point.max_length):
            if point.threshold:
                needed = thresholds[len(going), point.max_length - place]
                going = [reach for reach in going if reach >= needed]
            if not going:
                break
            seconds += costs.draft_seconds(len(going))
            going = [reach * random.choice(outlook) for reach in going]
            going = [reach for reach in going if reach >= point.threshold]
            verified += len(going)
            tokens += sum(going)
        seconds += costs.target_seconds(num_requests + verified)
        tokens += num_requests
    return tokens / seconds


@pytest.mark.parametrize("num_requests", [1, 3, 16])
@pytest.mark.parametrize("outlook", [INFORMATIVE, ORDINARY], ids=["informative", "ordinary"])
@pytest.mark.parametrize("target", [FLAT, LINEAR, STAIRS], ids=["flat", "linear", "stairs"])
def test_the_best_way_is_chosen(target, outlook, num_requests):
    book = book_for(target, outlook)
    price = book.price(num_requests, 0)
    steps = 1500 // num_requests
    goodput = simulated(book, price, num_requests, outlook, steps)
    assert price.goodput == pytest.approx(goodput, rel=0.1)
    points = [OperatingPoint(length) for length in range(7)]
    points += [OperatingPoint(6, threshold) for threshold in (0.1, 0.3, 0.5, 0.8)]
    others = [
        simulated(book, Price(each, price.goodput, 0.0), num_requests, outlook, steps)
        for each in points
    ]
    assert goodput >= 0.95 * max(others)


def test_what_is_free_is_done():
    free = StageCost((1,), (1e-6,))
    assert book_for(FLAT, [0.8], draft=free).price(1, 0).point == OperatingPoint(6)


@pytest.mark.parametrize("num_requests", [1, 20])
def test_what_is_dear_is_left(num_requests):
    dear = StageCost((1, 100), (0.1, 0.2))
    price = book_for(LINEAR, ORDINARY, draft=dear).price(num_requests, 0)
    assert price.point.max_length == 0
    assert price.goodput == pytest.approx(num_requests / LINEAR(num_requests))
    assert price.verify == pytest.approx(price.goodput * 0.001, rel=0.01)


def test_informative_signals_lead_to_a_threshold():
    price = book_for(LINEAR, INFORMATIVE).price(8, 0)
    assert price.point.threshold > 0


def test_steps_that_lead_down_again_are_crossed():
    """One token more costs a stair; seven more cost the same stair."""
    stair = StageCost((1, 1.01, 8), (0.010, 0.018, 0.018))
    cheap = StageCost((1,), (1e-4,))
    book = book_for(stair, [0.9], gamma=7, draft=cheap)
    assert book.price(1, 0).point == OperatingPoint(7)


def test_without_room_to_draft():
    assert PriceBook(FixedLatency(LINEAR, DRAFT), 0).price(4, 0).point == OperatingPoint(0)


def test_batch_sizes_have_choices_of_their_own():
    book = book_for(LINEAR, ORDINARY)
    goodput = [book.price(num_requests, 0).goodput for num_requests in (1, 2, 7, 8, 30)]
    assert goodput == sorted(set(goodput))
    assert book.price(30, 0) is book.price(30, 0)
    assert book.price(65, 0) is book.price(64, 0)


def test_choices_are_thought_over_after_pauses_that_double(monkeypatch):
    book = book_for(LINEAR, ORDINARY)
    calls, review = [], book._review
    monkeypatch.setattr(book, "_review", lambda *args: calls.append(args) or review(*args))
    monkeypatch.setattr(experience, "_UNCERTAINTY", 0.0)
    monkeypatch.setattr(pricing, "_YOUTH", 0)
    monkeypatch.setattr(PriceBook, "_is_overdue", lambda *_: False)
    num_calls = [0]
    for _ in range(1100):
        book.price(4, 0)
        num_calls.append(len(calls))
    reviews = [step for step in range(1, 1101) if num_calls[step] > num_calls[step - 1]]
    pause, last = pricing._SHORTEST_PAUSE, pricing._LONGEST_PAUSE
    expected = [pricing._FIRST_REVIEW]
    while expected[-1] + min(2 * pause, last) <= 1100:
        pause = min(2 * pause, last)
        expected.append(expected[-1] + pause)
    assert reviews == expected
    assert last in np.diff(reviews)


def test_another_kind_of_way_is_thought_over_again_soon(monkeypatch):
    """A disturbed machine makes drafts look dear; that must not last for hundreds of steps."""
    monkeypatch.setattr(experience, "_UNCERTAINTY", 0.0)
    monkeypatch.setattr(PriceBook, "_is_overdue", lambda *_: False)
    book = book_for(LINEAR, ORDINARY)
    for _ in range(1500):
        settled = book.price(4, 0).point
    (choice,) = book._choices.values()
    assert choice.pause == pricing._LONGEST_PAUSE
    assert settled.max_length > 0
    costs, book._latency = book._latency, FixedLatency(DEAR, DRAFT)
    choice.next_review = choice.num_steps + 1
    while book.price(4, 0).point.max_length > 0:
        pass
    book._latency = costs
    steps = 1
    while book.price(4, 0).point.max_length == 0:
        steps += 1
    assert steps <= 4 * pricing._SHORTEST_PAUSE


def test_equals_are_not_exchanged(monkeypatch):
    """A choice stays while nothing promises clearly more."""
    monkeypatch.setattr(PriceBook, "_is_overdue", lambda *_: False)
    book = book_for(LINEAR, ORDINARY)
    random, chosen = np.random.default_rng(0), set()
    for _ in range(300):
        book.price(4, 0)
        book.outlook.observe(random.permutation(ORDINARY)[:1], np.ones(1))
        (choice,) = book._choices.values()
        chosen.add(choice.best.point)
    assert len(chosen) <= 2


def test_goodput_follows_costs():
    latency = FixedLatency(LINEAR, DRAFT)
    book = PriceBook(latency, 4)
    before = book.price(2, 0)
    latency._target.stage = StageCost(LINEAR.tokens, tuple(3 * s for s in LINEAR.seconds))
    for _ in range(pricing._FIRST_REVIEW):
        after = book.price(2, 0)
    assert after.goodput < before.goodput / 2


class Reality:
    """A machine on which some ways keep another share of what they promise.

    Its pace may change over time, by a factor of the step's number.
    """

    def __init__(
        self, share, target=LINEAR, outlook=INFORMATIVE, noise=0.0, draft=DRAFT, pace=None
    ):
        self.book = book_for(target, outlook, draft=draft)
        self.book.work_seconds = lambda *_: self.book.promised_seconds
        self.share = share
        self._pace = pace or (lambda _: 1.0)
        self._noise = np.random.default_rng(0), noise
        self._num_steps = 0

    def run(self, num_steps, num_requests=8):
        """The ways in use, step by step."""
        points = []
        random, noise = self._noise
        for _ in range(num_steps):
            point = self.book.price(num_requests, 0).point
            points.append(point)
            slower = math.exp(noise * random.standard_normal()) / self.share(point)
            slower *= self._pace(self._num_steps)
            self.book.observe(self.book.promised_seconds * slower, (), ())
            self._num_steps += 1
        return points


def selects(points):
    return [point.threshold > 0 for point in points]


def test_broken_promises_are_believed_less():
    kinds = selects(Reality(lambda point: 0.4 if point.threshold else 1.0).run(1500))
    assert kinds[0]
    assert not all(kinds[:100])
    assert sum(kinds[500:]) < 0.06 * 1000


def test_what_is_realised_is_expected_from_then_on():
    kept = Reality(lambda point: 0.9 if point.threshold else 0.5)
    points = kept.run(1500)
    assert all(selects(points[-100:]))
    price = kept.book.price(8, 0)
    unbiased = Reality(lambda point: 1.0).book.price(8, 0)
    assert price.goodput == pytest.approx(0.9 * unbiased.goodput, rel=0.02)


def test_now_and_then_what_is_least_known_is_tried(monkeypatch):
    """Among the ways that are not much worse by what their like took."""
    monkeypatch.setattr(pricing, "_LONGEST_PAUSE", 12)
    reality = Reality(lambda point: 1.0, outlook=ORDINARY)
    reality.run(pricing._YOUTH + 50)
    (choice,) = reality.book._choices.values()
    experience = choice.experience
    least_known = []
    for _ in range(2000):
        before = {p: experience.optimism(p) for p in reality.book._points}
        num_reviews = choice.num_reviews
        reality.run(1)
        curious = choice.num_reviews > num_reviews and not choice.num_reviews % 8
        if curious and choice.rival is not None:
            least_known.append(before[choice.rival.point] >= 0.99 * max(before.values()))
    assert len(least_known) > 3
    assert all(least_known)


def test_kept_promises_change_nothing():
    reality = Reality(lambda point: 1.0)
    first = reality.book.price(8, 0)
    # But for one trial of each other kind.
    assert sum(selects(reality.run(600))) >= 600 - 2 * pricing._TRIAL
    assert reality.book.price(8, 0).goodput == pytest.approx(first.goodput, rel=0.01)


@pytest.mark.parametrize("share", [0.85, 0.9])
@pytest.mark.parametrize("best", [0, 1, 2, 4])
def test_a_way_that_is_better_than_promised_is_found(best, share, monkeypatch):
    """All promise the same; one keeps more."""
    monkeypatch.setattr(pricing, "_THRESHOLDS", (0.1, 0.3))
    gained = [8 * sum(0.5**i for i in range(length + 1)) for length in range(7)]
    even = StageCost((1, *range(8, 57, 8)), (0.010, *(0.002 * each for each in gained)))
    reality = Reality(
        lambda point: 1.0 if point == OperatingPoint(best) else share,
        even,
        [0.5],
        noise=0.05,
        draft=StageCost((1, 4096), (1e-9, 1e-9)),
    )
    used = reality.run(4000)[-1000:]
    assert used.count(OperatingPoint(best)) > 700


def test_trials_cost_little():
    reality = Reality(lambda point: 1.0, outlook=ORDINARY, noise=0.05)
    points = reality.run(3000)[500:]
    best = max(set(points), key=points.count)
    promises = reality.book._promises(8, 0, 100.0, experience.Experience())
    used = [promises[point][0] for point in points]
    goodput = sum(each.tokens for each in used) / sum(each.seconds for each in used)
    assert goodput > 0.985 * promises[best][0].goodput


@pytest.mark.parametrize("period", [40, 110, 300])
def test_a_machine_that_changes_its_pace_does_not_mislead(period):
    """Target-only steps are a little quicker than anything else; all are half as slow at times."""
    reality = Reality(
        lambda point: 1.0 if point.max_length else 1.1,
        StageCost((1, 4096), (0.001, 4.096)),
        [0.9],
        noise=0.03,
        pace=lambda step: 1.0 + 0.5 * (step // period % 2),
    )
    used = reality.run(3000)[1000:]
    assert used.count(OperatingPoint(0)) > 1600


def test_the_rival_begins_and_takes_turns():
    reality = Reality(lambda point: 1.0, outlook=ORDINARY)
    while True:
        (first,) = reality.run(1)
        (choice,) = reality.book._choices.values()
        if choice.rival:
            break
    points = [first, *reality.run(pricing._TRIAL - 1)]
    best, rival = choice.best.point, choice.rival.point
    turn = [rival] * pricing._TURN + [best] * pricing._TURN
    assert points == turn * (pricing._TRIAL // len(turn))
    reality.run(1)
    assert choice.rival is None


def test_what_a_step_was_expected_to_take_is_that_of_its_work():
    book = book_for(LINEAR, ORDINARY)
    book.price(4, 0)
    drafted, verified = (3, 0, 2, 1), (2, 0, 2, 1)
    seconds = LINEAR(4 + 5) + DRAFT(3) + DRAFT(2) + DRAFT(1)
    assert book.work_seconds(drafted, verified) == pytest.approx(seconds)
    seen = []
    (choice,) = book._choices.values()
    choice.experience.observe = lambda *each: seen.append(each)
    book.observe(0.5, drafted, verified)
    ((point, promise, took),) = seen
    assert (point, took) == (choice.best.point, 0.5)
    assert promise.seconds == pytest.approx(seconds)


def test_what_is_settled_is_looked_at_now_and_then():
    book = book_for(LINEAR, ORDINARY)
    book.price(4, 0)
    (choice,) = book._choices.values()
    choice.is_young, choice.next_review = False, math.inf
    seen = []
    choice.experience.observe = lambda *each: seen.append(each)
    for _ in range(40):
        book.price(4, 0)
        book.observe(0.5, (1,) * 4, (1,) * 4)
    assert len(seen) == 40 / pricing._OBSERVE_EVERY


def test_what_is_thought_too_dear_is_found():
    """Nothing but trying it shows that target-only steps are quicker than promised."""
    reality = Reality(lambda point: 1.0 if point.max_length else 4.0)
    promises = reality.book._promises(8, 0, 100.0, experience.Experience())
    goodput = {point: promise.goodput for point, (promise, _) in promises.items()}
    assert 0.25 * max(goodput.values()) < goodput[OperatingPoint(0)] < 0.8 * max(goodput.values())
    used = reality.run(200)[100:]
    assert used.count(OperatingPoint(0)) > 80


def test_a_trial_is_short():
    reality = Reality(lambda point: 1.0, outlook=ORDINARY)
    for _ in range(400):
        reality.run(1)
        (choice,) = reality.book._choices.values()
        if choice.rival:
            assert choice.next_review - choice.num_steps <= pricing._TRIAL


def test_a_disappointment_fades():
    shares = {True: 0.4, False: 1.0}
    reality = Reality(lambda point: shares[point.threshold > 0])
    assert sum(selects(reality.run(1000)[-50:])) <= pricing._TRIAL
    shares[True] = 1.0
    assert all(selects(reality.run(8_000)[-100:]))


def test_a_pause_of_the_machine_is_no_property_of_the_step():
    reality = Reality(lambda point: 1.0)
    first = reality.book.price(8, 0)
    for step in range(1500):
        price = reality.book.price(8, 0)
        pause = 500.0 if step % 50 == 30 else 1.0
        reality.book.observe(pause * reality.book.promised_seconds, (), ())
    assert price.point.threshold > 0
    assert price.goodput > 0.8 * first.goodput


def test_a_clock_that_stands_still():
    book = book_for(LINEAR, INFORMATIVE)
    for _ in range(30):
        price = book.price(8, 0)
        book.observe(0.0, (1,), (1,))
    assert math.isfinite(price.goodput)


def test_what_was_never_priced_is_no_news():
    book = book_for(LINEAR, INFORMATIVE)
    book.observe(1.0, (1,), (1,))
    assert book.price(8, 0).goodput == book_for(LINEAR, INFORMATIVE).price(8, 0).goodput


def test_what_drafting_needs_falls_with_those_who_share_and_the_draws_left():
    book = book_for(LINEAR, ORDINARY)
    price = Price(OperatingPoint(6, 0.3), book.price(8, 0).goodput, 0.3)
    alone, shared = book.draft_thresholds(price, 8)[[1, 8]]
    assert (shared[1:] < alone[1:]).all()
    assert shared[0] == math.inf
    assert (np.diff(shared[1:]) <= 0).all()


def test_the_companions_price():
    latency = FixedLatency(LINEAR, DRAFT, StageCost((1, 11), (0.001, 0.011)))
    price = Price(OperatingPoint(3), 200.0, 0.0)
    assert PriceBook(latency, 3).companion_price(price, 6) == pytest.approx(200 * 0.006)
