"""The oracle predicts the target's decisions exactly, and its time is not counted."""

import functools
from types import SimpleNamespace

import pytest
import torch

from draftwise import RequestSpeculation, SamplingParams
from draftwise.engine import oracle, step
from draftwise.kernels.native.drafting import DraftRun

from ..stand_ins import vary_choices
from ..tiny_models import Recipe
from .assembly import assemble_recipe
from .test_companion import GREEDY, MIXED, work

RECIPE = Recipe(vocab=32, seed=8)


@pytest.fixture
def varying_prices(monkeypatch):
    """Drafts end early and tokens are dropped, in some steps and not in others."""
    vary_choices(monkeypatch, [4], [0.3, 0.0, 0.6, 0.1])


def build(models, draft_noise=0.1, max_batch_size=5):
    return assemble_recipe(
        models, RECIPE, max_batch_size, draft_noise, policy="oracle", num_speculative_tokens=4
    )


class Watch:
    """Compares the oracle's predictions with the outcome of each step."""

    def __init__(self, engine):
        self.policy = engine.policies.default
        self.lengths = set()
        self.verified = self.dropped = 0
        self.acceptance = []
        observe = self.policy.observe

        @functools.wraps(observe)
        def watched(outcome, times):
            self.compare(outcome)
            observe(outcome, times)

        self.policy.observe = watched

    def compare(self, outcome):
        self.lengths.add(outcome.num_drafted)
        if outcome.acceptance is None:
            return
        for row, count in enumerate(outcome.num_verified):
            expected = torch.from_numpy(self.policy._expected[row, :count]).float()
            found = outcome.acceptance[row, :count]
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)
            self.acceptance += found.tolist()
        self.verified += sum(outcome.num_verified)
        self.dropped += sum(outcome.num_drafted) - sum(outcome.num_verified)


@pytest.mark.parametrize("kinds", [[GREEDY], MIXED], ids=["greedy", "mixed"])
def test_predictions_equal_the_acceptance_of_every_verified_token(models, varying_prices, kinds):
    """With temperatures, top-k, penalties, greedy requests and ragged drafts."""
    engine = build(models)
    watch = Watch(engine)
    prompts, params = work(kinds, 20)
    waiting = list(zip(prompts, params, strict=True))
    while waiting or engine.num_unfinished:
        for prompt, each in waiting[:3]:
            engine.add(None, prompt, each)
        waiting = waiting[3:]
        engine.step()
    assert watch.verified > 100
    assert watch.dropped > 20
    assert len({len(set(lengths)) > 1 for lengths in watch.lengths}) == 2
    certain = [value in (0.0, 1.0) for value in watch.acceptance]
    assert all(certain) == (kinds != MIXED)
    if kinds == MIXED:
        assert len(set(watch.acceptance)) > 50


def test_a_draft_equal_to_the_target_is_always_accepted(models, varying_prices):
    """The draft model has the same weights as the target."""
    engine = build(models, draft_noise=0.0)
    watch = Watch(engine)
    for seed in range(6):
        engine.add(None, [1, 2, seed], SamplingParams(max_tokens=20, seed=seed))
    while engine.num_unfinished:
        engine.step()
    assert watch.verified > 50
    assert watch.dropped == 0
    assert min(watch.acceptance) > 0.999


class Clock:
    """A clock that only advances on request."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def slow(self, function, seconds):
        @functools.wraps(function)
        def slowed(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slowed


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    fake = SimpleNamespace(perf_counter=clock.perf_counter)
    monkeypatch.setattr(oracle, "time", fake)
    monkeypatch.setattr(step, "time", fake)
    return clock


def test_time_of_the_oracle_is_not_counted(models, varying_prices, clock, monkeypatch):
    engine = build(models)
    teller = engine._pipeline.oracle
    # The oracle's own work, during and after drafting, takes very long.
    for name in ("read", "read_one"):
        monkeypatch.setattr(
            teller._cached_model, name, clock.slow(getattr(teller._cached_model, name), 1000.0)
        )
    for name in ("probabilities", "overlap"):
        monkeypatch.setattr(oracle, name, clock.slow(getattr(oracle, name), 300.0))
    drafter, verifier = engine._pipeline.proposer, engine._verifier
    monkeypatch.setattr(
        drafter.cached_model, "read_one", clock.slow(drafter.cached_model.read_one, 0.25)
    )
    draw = DraftRun.draw

    def slow_draw(run, num_positions):
        clock.now += 0.25 * (num_positions - (run._call.first is not None))
        return draw(run, num_positions)

    monkeypatch.setattr(DraftRun, "draw", slow_draw)
    monkeypatch.setattr(verifier, "verify", clock.slow(verifier.verify, 2.0))
    for seed in range(4):
        engine.add(None, [1, 2, 3], SamplingParams(max_tokens=16, seed=seed))
    start, total, drafts = clock.now, 0.0, []
    while engine.num_unfinished:
        told = engine.uncounted_seconds
        engine.step()
        times = engine.times
        assert times.verify == 2.0
        assert times.companion == times.select == times.accept == 0.0
        # One draft pass per token except the first, which the pass over the text gives.
        assert times.draft == pytest.approx(0.25 * round(times.draft / 0.25), abs=1e-6)
        assert 0 <= times.draft <= 0.75
        drafts.append(times.draft)
        if times.draft:
            assert engine.uncounted_seconds - told > 1000
        total += times.total
    assert max(drafts) == 0.75
    assert engine.uncounted_seconds > 10_000
    assert total < 100
    assert clock.now - start == pytest.approx(total + engine.uncounted_seconds)


def test_without_an_oracle_all_time_is_counted(models):
    engine = assemble_recipe(models, RECIPE, 2, policy="fixed", num_speculative_tokens=2)
    engine.add(None, [1, 2], SamplingParams(max_tokens=5))
    engine.step()
    assert engine.uncounted_seconds == 0


def test_other_policies_get_no_scores_of_the_target(models, varying_prices):
    """A request with its own policy gets no scores of the target."""
    engine = build(models)
    heard = []
    policy = engine.policies.get("adaptive")
    select = policy.select
    policy.select = lambda draft, companion_scores: (
        heard.append(companion_scores) or select(draft, companion_scores)
    )
    for seed, name in enumerate([None, "adaptive", None, "adaptive"]):
        params = SamplingParams(max_tokens=24, seed=seed)
        engine.add(None, [1, 2, seed], params, RequestSpeculation(policy=name))
    while engine.num_unfinished:
        engine.step()
    assert len(heard) > 5
    assert set(heard) == {None}
