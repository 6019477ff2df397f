"""Which steps of an engine update the latency model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftwise import SamplingParams
from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import CompanionScores, Draft, StepTimes
from draftwise.engine.step import CostLearner, Step
from draftwise.models.static_steps import Recording

from ..tiny_models import Recipe
from .assembly import assemble_recipe


def latency():
    cost = StageCost((1.0, 64.0), (0.01, 0.04))
    return LatencyModel(cost, cost, cost)


def step(num_drafted, num_verified, signals=None, companion_scores=None):
    requests = [SimpleNamespace(tokens=[0] * 50) for _ in num_drafted]
    return Step(
        pipeline=None,
        clock=None,
        batch=SimpleNamespace(chunks=[], generating=requests, can_draft=[True] * len(requests)),
        draft=Draft(torch.zeros(0), tuple(num_drafted), None, signals),
        companion_scores=companion_scores,
        plan=SimpleNamespace(lengths=num_verified),
        logits=None,
        states=None,
        outcome=None,
    )


def times(draft, verify, companion=0.0):
    return StepTimes(draft, companion, 0.0, verify, 0.0, 0.0)


def test_plain_steps_update_the_costs_of_passes():
    model = latency()
    learner, before = CostLearner(model), (model.target_seconds(16), model.draft_seconds(4))
    for _ in range(60):
        learner.observe(step((3,) * 4, (3,) * 4), times(draft=0.09, verify=0.05))
    assert model.target_seconds(16) > 2 * before[0]
    assert model.draft_seconds(4) > 2 * before[1]


def test_steps_with_signals_do_not_update_the_costs_of_passes():
    """Selected tokens make irregular passes. Other operating points do not become slower."""
    model = latency()
    learner, before = CostLearner(model), (model.target_seconds(16), model.draft_seconds(4))
    for _ in range(60):
        picked = step((3, 1, 5, 2), (2, 1, 4, 0), signals=object())
        learner.observe(picked, times(draft=0.09, verify=0.05))
    assert (model.target_seconds(16), model.draft_seconds(4)) == before


@pytest.mark.parametrize("lengths", [(3,), (2,) * 4])
def test_regular_steps_with_signals_update_the_cost_of_the_target(lengths):
    """Otherwise a few early steps would decide for long what a token costs."""
    model = latency()
    learner, before = CostLearner(model), (model.target_seconds(16), model.draft_seconds(4))
    for _ in range(60):
        picked = step((5,) * len(lengths), lengths, signals=object())
        learner.observe(picked, times(draft=0.09, verify=0.05))
    assert model.target_seconds(16) > 2 * before[0]
    assert model.draft_seconds(4) == before[1]


def test_scored_steps_update_the_cost_of_the_companion():
    model = latency()
    learner, before = CostLearner(model), model.companion_seconds(12)
    zeros = torch.zeros(4, 3)
    scores = CompanionScores(zeros, zeros, zeros)
    for _ in range(60):
        scored = step((3,) * 4, (2, 1, 3, 0), signals=object(), companion_scores=scores)
        learner.observe(scored, times(draft=0.01, verify=0.02, companion=0.05))
    assert model.companion_seconds(12) > 2 * before


def test_steps_with_prompts_do_not_update_the_costs():
    model = latency()
    learner, before = CostLearner(model), model.target_seconds(16)
    with_prompt = step((3,) * 4, (3,) * 4)
    with_prompt.batch.chunks = [object()]
    for _ in range(60):
        learner.observe(with_prompt, times(draft=0.02, verify=0.2))
    assert model.target_seconds(16) == pytest.approx(before)


def test_disturbed_steps_update_nothing():
    model = latency()
    learner, before = CostLearner(model), (model.target_seconds(16), model.draft_seconds(4))
    for _ in range(60):
        disturbed = replace(times(draft=0.09, verify=0.05), disturbed=True)
        learner.observe(step((3,) * 4, (3,) * 4), disturbed)
    assert (model.target_seconds(16), model.draft_seconds(4)) == before


def test_steps_that_capture_a_graph_are_disturbed(models, monkeypatch):
    """A pass of a new size is run and captured, which takes much longer than a replay."""
    engine = assemble_recipe(models, Recipe(vocab=16), 4, policy="fixed")
    verify = engine._verifier.verify
    captures = [False, True, False]

    def verifying(*arguments):
        Recording.num_prepared += captures[len(found)]
        return verify(*arguments)

    monkeypatch.setattr(engine._verifier, "verify", verifying)
    engine.add(None, [1, 2, 3], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    found = []
    for _ in captures:
        engine.step()
        found.append(engine.times.disturbed)
    assert found == captures


def test_simulated_times_replace_the_measured_ones(models):
    """They are computed from the step's work, and the costs of passes are learnt from them."""
    engine = assemble_recipe(models, Recipe(vocab=16), 4, policy="fixed")
    model = latency()
    engine._costs = CostLearner(model)
    observed = []

    def simulated(done):
        observed.append((done.num_target_tokens, done.num_companion_tokens))
        return times(draft=0.0, verify=7.0)

    engine.simulated_times = simulated
    before = model.target_seconds(1)
    engine.add(None, [1, 2, 3], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    while engine.num_unfinished:
        engine.step()
        assert engine.times.total == 7.0
    assert all(tokens >= 1 and scored == 0 for tokens, scored in observed[1:])
    assert model.target_seconds(1) > 2 * before
