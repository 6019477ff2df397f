"""What passes cost inside vLLM, timed on a runner that is made up."""

import time

import pytest

from draftwise.integrations.vllm import passes
from draftwise.integrations.vllm.passes import measure_costs, sizes_up_to, timed


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
def test_sizes(most, sizes):
    assert sizes_up_to(most) == sizes


class Clock:
    """Passes that take what is said, on a clock that nothing else moves."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.passes, self.seconds = 0.0, [], seconds
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, num_tokens):
        self.passes.append(num_tokens)
        self.now += self.seconds(num_tokens)


def test_a_pass_is_timed_after_a_first_one(monkeypatch):
    first = set()

    def seconds(size):
        slow = size not in first
        first.add(size)
        return (0.3 if slow else 0.01) + size * 0.001

    clock = Clock(monkeypatch, seconds)
    cost = timed(clock.run, [1, 2, 4])
    assert cost.tokens == (1.0, 2.0, 4.0)
    assert cost.seconds == pytest.approx((0.011, 0.012, 0.014))


def test_what_was_disturbed_takes_no_longer_than_a_larger_pass(monkeypatch):
    cost = timed(Clock(monkeypatch, lambda size: {1: 0.02, 2: 0.01, 4: 0.03}[size]).run, [1, 2, 4])
    assert cost.seconds == pytest.approx((0.01, 0.01, 0.03))


def test_the_best_of_some_rounds(monkeypatch):
    """A pause of the machine is no property of a pass."""
    clock = Clock(monkeypatch, lambda size: 0.01 * size + 0.2 * (len(clock.passes) % 5 == 1))
    assert timed(clock.run, [1, 2, 4]).seconds == pytest.approx((0.01, 0.02, 0.04))


def test_nothing_larger_than_what_takes_long(monkeypatch):
    clock = Clock(monkeypatch, lambda size: 0.2 * size)
    assert timed(clock.run, [1, 2, 4, 8]).tokens == (1.0, 2.0, 4.0)
    assert 8 not in clock.passes


class Runner:
    """Counts who ran beside the target."""

    max_num_tokens = 40

    class scheduler_config:  # noqa: N801
        max_num_seqs = 8

    def __init__(self, proposer):
        self.proposer, self.sizes = proposer, []

    def _dummy_run(self, num_tokens, skip_eplb):
        assert skip_eplb
        assert self.proposer.rests
        self.sizes.append(num_tokens)


class Proposer:
    num_speculative_tokens = 5
    rests = False

    def __init__(self):
        self.drafted, self.judged = [], []

    def draft_pass(self, num_tokens):
        assert not self.rests
        self.drafted.append(num_tokens)

    def companion_pass(self, num_tokens):
        self.judged.append(num_tokens)


@pytest.mark.parametrize("has_companion", [True, False])
def test_each_model_is_timed_alone(has_companion):
    proposer = Proposer()
    runner = Runner(proposer)
    costs = measure_costs(runner, proposer, has_companion)
    assert max(runner.sizes) == 40  # of 8 + 8 · 5 no more than vLLM takes at once
    assert max(proposer.drafted) == 8
    assert max(proposer.judged, default=0) == (40 if has_companion else 0)
    assert (costs.companion is not None) == has_companion
    assert costs.target.tokens[-1] == 40.0


def test_a_pass_that_fails_leaves_nobody_resting():
    proposer = Proposer()
    runner = Runner(proposer)
    runner._dummy_run = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        measure_costs(runner, proposer, has_companion=False)
    assert not proposer.rests


def test_waits_for_an_accelerator(monkeypatch):
    """What was only put on a queue has not taken its time yet."""
    waited = []
    monkeypatch.setattr(passes.torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(passes.torch.accelerator, "synchronize", lambda: waited.append(True))
    timed(lambda _: None, [1])
    assert len(waited) == 2 * (1 + 4)
