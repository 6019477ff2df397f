"""Measurement of the costs of passes inside vLLM, with a fake runner and clock."""

import time

import pytest

from draftwise.integrations.vllm import pass_costs
from draftwise.integrations.vllm.agreement import Alone
from draftwise.integrations.vllm.pass_costs import measure_costs, sizes_up_to, timed

from .ranks import Follower, Leader


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (7, [1, 2, 4, 7]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (40, [1, 2, 4, 8, 16, 24, 32, 40]),
        (192, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192]),
    ],
)
def test_sizes_of_timed_passes(most, sizes):
    assert sizes_up_to(most) == sizes


class Clock:
    """Passes that advance a fake clock by a given time."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.passes, self.seconds = 0.0, [], seconds
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, num_tokens):
        self.passes.append(num_tokens)
        self.now += self.seconds(num_tokens)


def test_a_pass_is_timed_after_a_warm_up_pass(monkeypatch):
    first = set()

    def seconds(size):
        slow = size not in first
        first.add(size)
        return (0.3 if slow else 0.01) + size * 0.001

    clock = Clock(monkeypatch, seconds)
    cost = timed(clock.run, [1, 2, 4], Alone())
    assert cost.tokens == (1.0, 2.0, 4.0)
    assert cost.seconds == pytest.approx((0.011, 0.012, 0.014))


def test_a_disturbed_pass_gets_the_time_of_a_larger_one(monkeypatch):
    clock = Clock(monkeypatch, lambda size: {1: 0.02, 2: 0.01, 4: 0.03}[size])
    cost = timed(clock.run, [1, 2, 4], Alone())
    assert cost.seconds == pytest.approx((0.01, 0.01, 0.03))


def test_the_shortest_time_of_all_rounds_counts(monkeypatch):
    """A pause of the machine must not affect the result."""
    clock = Clock(monkeypatch, lambda size: 0.01 * size + 0.2 * (len(clock.passes) % 5 == 1))
    assert timed(clock.run, [1, 2, 4], Alone()).seconds == pytest.approx((0.01, 0.02, 0.04))


def test_sizes_above_a_slow_pass_are_left_out(monkeypatch):
    clock = Clock(monkeypatch, lambda size: 0.2 * size)
    assert timed(clock.run, [1, 2, 4, 8], Alone()).tokens == (1.0, 2.0, 4.0)
    assert 8 not in clock.passes


def test_a_pass_that_compiles_is_not_a_slow_one(monkeypatch):
    clock = Clock(monkeypatch, lambda size: 10.0 if size not in clock.passes[:-1] else 0.01 * size)
    assert timed(clock.run, [1, 2, 4], Alone()).tokens == (1.0, 2.0, 4.0)


@pytest.mark.parametrize("is_slower", [True, False])
def test_all_ranks_stop_after_the_same_size(monkeypatch, is_slower):
    """Their passes wait for each other, and each rank has its own clock."""
    leader = Leader()
    first = Clock(monkeypatch, lambda size: 0.2 * size)
    timed(first.run, [1, 2, 4, 8], leader)
    other = Clock(monkeypatch, lambda size: (0.9 if is_slower else 0.01) * size)
    timed(other.run, [1, 2, 4, 8], Follower(leader.decisions))
    assert other.passes == first.passes
    assert max(first.passes) == 4


class Runner:
    """A model runner that records the sizes of the target's passes."""

    max_num_tokens = 40

    class scheduler_config:  # noqa: N801
        max_num_seqs = 8

    def __init__(self, drafter):
        self.drafter, self.sizes = drafter, []

    def _dummy_run(self, num_tokens, skip_eplb):
        assert skip_eplb
        assert self.drafter.skips_dummy_runs
        self.sizes.append(num_tokens)


class Companion:
    def __init__(self):
        self.sizes = []

    def pass_without_context(self, num_tokens):
        self.sizes.append(num_tokens)


class Drafter:
    num_speculative_tokens = 5
    skips_dummy_runs = False

    def __init__(self, has_draft_model=True, companion=None):
        self.has_draft_model, self.companion = has_draft_model, companion
        self.draft_sizes = []

    def draft_pass(self, num_tokens):
        assert not self.skips_dummy_runs
        self.draft_sizes.append(num_tokens)


@pytest.mark.parametrize("companion", [Companion(), None])
def test_each_model_is_timed_alone(companion):
    drafter = Drafter(companion=companion)
    runner = Runner(drafter)
    costs = measure_costs(runner, drafter, Alone())
    assert max(runner.sizes) == 40  # 8 + 8 · 5, limited to vLLM's largest pass
    assert max(drafter.draft_sizes) == 8
    assert costs.target.tokens[-1] == 40.0
    if companion is None:
        assert costs.companion is None
    else:
        assert max(companion.sizes) == costs.companion.tokens[-1] == 40


def test_only_the_target_is_timed_without_a_draft_model():
    drafter = Drafter(has_draft_model=False)
    costs = measure_costs(Runner(drafter), drafter, Alone())
    assert costs.draft is None
    assert not drafter.draft_sizes
    assert costs.target.tokens[-1] == 40.0


def test_dummy_runs_are_enabled_again_after_an_error():
    drafter = Drafter()
    runner = Runner(drafter)
    runner._dummy_run = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        measure_costs(runner, drafter, Alone())
    assert not drafter.skips_dummy_runs


def test_timing_waits_for_the_accelerator(monkeypatch):
    """Kernels that are only queued have not run yet."""
    waited = []
    monkeypatch.setattr(pass_costs.torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(pass_costs.torch.accelerator, "synchronize", lambda: waited.append(True))
    timed(lambda _: None, [1], Alone())
    assert len(waited) == 2 * (1 + 4)
