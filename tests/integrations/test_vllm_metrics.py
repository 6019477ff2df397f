"""The counters of the worker, read from the registry that vLLM exports."""

import pytest
from prometheus_client import REGISTRY

from draftwise.integrations.vllm.metrics import Metrics
from draftwise.integrations.vllm.steps import PendingStep, RequestView, Verified

TOKENS = {"drafted_tokens", "dropped_tokens"}
TIMES = {"steps", "step_seconds", "draft_seconds", "select_seconds", "request_steps"}


@pytest.fixture
def added():
    """A function that returns how much each counter has grown since the test began."""

    def read():
        return {
            sample.name.removeprefix("draftwise:").removesuffix("_total"): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith("draftwise:") and sample.name.endswith("_total")
        }

    Metrics()
    before = read()

    def grown():
        return {name: value - before.get(name, 0.0) for name, value in read().items()}

    return grown


def result_of(verified, seconds):
    """The result of a step of two requests, each with 3 drafted tokens of which 2 were sent."""
    views = [RequestView(name, 20, 4, 5, True) for name in ("a", "b")]
    step = PendingStep(views, (3, 3), (2, 2), 3, False, False, 0.002, 0.0, 0.001)
    outcome = step.outcome(step.results(verified))
    return step.result(outcome, step.times(seconds, 0, False))


def test_a_step_counts_tokens_and_times(added):
    Metrics().observe(result_of({"a": Verified(2, 2), "b": Verified(2, 0)}, 0.05))
    grown = added()
    assert grown["steps"] == 1
    assert grown["request_steps"] == 2
    assert (grown["drafted_tokens"], grown["dropped_tokens"]) == (6, 2)
    assert (grown["verified_tokens"], grown["accepted_tokens"]) == (4, 2)
    assert grown["gained_tokens"] == 4
    assert grown["step_seconds"] == pytest.approx(0.05)
    assert grown["draft_seconds"] == pytest.approx(0.002)


def test_a_step_of_which_one_request_has_ended_counts(added):
    Metrics().observe(result_of({"b": Verified(2, 1)}, 0.05))
    assert added()["steps"] == 1
    assert added()["step_seconds"] == pytest.approx(0.05)


def test_time_without_requests_does_not_count(added):
    """All requests of the last step have ended, and the next request comes an hour later."""
    Metrics().observe(result_of({"other": Verified(0, 0)}, 3600.0))
    grown = added()
    assert not any(grown[name] for name in TIMES)
    assert all(grown[name] for name in TOKENS)


def test_a_second_engine_in_a_process_uses_the_same_counters(added):
    for _ in range(2):
        Metrics().observe(result_of({"a": Verified(2, 2)}, 0.01))
    assert added()["steps"] == 2
