"""Passes of all sizes that a policy chooses from are prepared before the first request."""

import pytest

from draftwise import SamplingParams
from draftwise.engine.rehearsal import batch_sizes, rehearse

from ..engine.assembly import generate, token_ids
from ..tiny_models import Recipe
from .placing import RECORDED, assemble, assemble_with

pytestmark = pytest.mark.slow

RECIPE = Recipe("llama", 32)
LARGEST = 5


def rehearsed(engine, limit_seconds=1e9):
    """Rehearse; returns what was said about it."""
    said = []
    num_steps = rehearse(engine, LARGEST, said.append, limit_seconds)
    assert num_steps > 0 or not limit_seconds
    return said


def num_sizes(engine):
    """Number of sizes that were prepared for the target.

    What the draft reads before it drafts depends on what was accepted.
    """
    return engine._verifier._cache.steps.num_sizes


def test_batch_sizes():
    assert batch_sizes(1) == [1]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]


@pytest.mark.parametrize("place", RECORDED, ids=str)
@pytest.mark.parametrize("policy", ["adaptive", "fixed", "sv"])
def test_a_rehearsal_prepares_all_sizes_and_changes_nothing(models, place, policy):
    settings = {"policy": policy, "num_speculative_tokens": 4}
    engine = assemble(place, models, RECIPE, LARGEST, **settings)
    default, guard = engine.policies.default, engine.policies.guard
    said = rehearsed(engine)
    assert said == [f"preparing steps of {n} request{'s' * (n > 1)}" for n in (1, 2, 4, 5)]
    assert (engine.policies.default, engine.policies.guard) == (default, guard)
    assert engine.num_unfinished == 0
    known = num_sizes(engine)
    assert known >= 10
    rehearsed(engine)
    assert num_sizes(engine) == known
    prompts = [[index, 1, 2, 3] for index in range(LARGEST)]
    params = [SamplingParams(temperature=0, max_tokens=12)] * LARGEST
    plain = assemble(place, models, RECIPE, LARGEST, **settings)
    outputs = generate(engine, prompts, params)
    assert token_ids(outputs) == token_ids(generate(plain, prompts, params))


def test_a_rehearsal_ends_in_time(models):
    engine = assemble(RECORDED[0], models, RECIPE, LARGEST, policy="fixed")
    assert rehearsed(engine, limit_seconds=0.0) == ["preparing steps of 1 request"]
    assert engine.num_unfinished == 0


def test_without_a_model_any_tokens_are_verified_and_none_are_remembered(models):
    settings = {"policy": "adaptive", "remember_outputs": True}
    engine = assemble_with(RECORDED[0], models, RECIPE, "suffix", LARGEST, **settings)
    proposer = engine.pipeline.proposer
    rehearsed(engine)
    assert engine.pipeline.proposer is proposer
    assert engine._verifier._cache.steps.num_sizes >= len({1, 2, 3, 4, 5, 6})
    assert engine.corpus.num_tokens == 0
    generate(engine, [[1, 2, 3]] * 3, [SamplingParams(max_tokens=8)] * 3)
    assert engine.corpus.num_tokens > 0
