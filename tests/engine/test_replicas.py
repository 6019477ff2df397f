"""Drafting in two processes gives the same outputs as drafting in one."""

import numpy as np
import pytest
import torch

from draftwise import LLM, RequestSpeculation, SamplingParams, building
from draftwise.engine.parallel.replicas.messages import ModelSpec, ReplicaSpec
from draftwise.engine.parallel.replicas.processes import Replicas
from draftwise.engine.parallel.replicas.replicated import check_replicas
from draftwise.errors import InvalidParameterError, ReplicaError

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..stand_ins import fixed_latency, unguarded
from ..tiny_models import Recipe
from .assembly import assert_same_with_cancellations, token_ids, varied_work
from .exact import exact_distribution

pytestmark = pytest.mark.slow

RECIPE = Recipe(vocab=16, seed=6)


def build(models, num_replicas, policy="fixed", companion=None, **options):
    speculation = unguarded(
        models.folder(RECIPE.draft()),
        companion=companion and models.folder(RECIPE.draft(noise=0.2, noise_seed=2)),
        num_speculative_tokens=3,
        policy=policy,
    )
    return LLM(
        models.folder(RECIPE),
        speculation,
        dtype="float32",
        draft_replicas=num_replicas,
        **options,
    )


def processes_of(llm):
    """The processes that draft beside the engine."""
    return llm.engine._pipeline.proposer._shares.replicas.close.peek()[2][1]


@pytest.fixture(scope="module")
def replicated(models):
    """One engine shared by tests that only generate, because each engine starts a process."""
    made = build(models, 2, max_batch_size=7, max_chunk_tokens=9)
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["fixed", "svip", "adaedl", "heuristic"])
def test_texts_are_the_same(models, replicated, policy):
    """The policies never stop a draft, stop it by signals, or stop it by earlier steps."""
    alone = build(models, 1, policy, max_batch_size=7, max_chunk_tokens=9)
    replicated.change_speculation(policy=policy)
    outputs = replicated.generate(*varied_work(40))
    expected = alone.generate(*varied_work(40))
    assert token_ids(outputs) == token_ids(expected)
    for mine, other in zip(outputs, expected, strict=True):
        assert mine.speculation.num_drafted == other.speculation.num_drafted
        assert mine.speculation.num_accepted == other.speculation.num_accepted


def test_each_replica_drafts_for_its_requests(replicated, monkeypatch):
    """Requests in odd slots belong to the replica. It only gets their new tokens."""
    seen, send = [], Replicas.send
    monkeypatch.setattr(
        Replicas, "send", lambda self, value, rank: seen.append(value) or send(self, value, rank)
    )
    replicated.change_speculation(policy="fixed")
    replicated.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=9, ignore_eos=True))
    assert {slot for share in seen for slot in share.cache_slots} == {1, 3}
    for share in seen[2:]:  # all prompts are read by then
        assert all(not change.is_new and len(change.tail) <= 4 for change in share.texts)


def test_requests_can_join_and_be_cancelled(models, replicated):
    replicated.change_speculation(policy="fixed")
    expected = token_ids(build(models, 1, max_batch_size=7).generate(*varied_work(40)))
    assert_same_with_cancellations(replicated.engine, expected)


def test_companions_of_replicas_score_their_requests(models):
    """The staged policy uses the companion's scores in every step. Closing ends the processes."""
    together, alone = (build(models, n, "staged", "yes", max_batch_size=5) for n in (2, 1))
    outputs, expected = (llm.generate(*varied_work(30)) for llm in (together, alone))
    assert token_ids(outputs) == token_ids(expected)
    drafted = [output.speculation.num_scored for output in outputs]
    assert drafted == [output.speculation.num_scored for output in expected]
    assert sum(drafted) > 0
    (process,) = processes_of(together)
    for _ in range(2):  # closing twice has no effect
        together.close()
    assert process.poll() == 0


@pytest.mark.parametrize("policy", ["adaptive", "sv"])
def test_texts_follow_the_target(models, policy, monkeypatch):
    """Replicas apply the policy's rule. With ``sv`` they also score drafts."""
    recipe = Recipe(vocab=8, seed=3, config={"num_hidden_layers": 1})
    draft, companion = recipe.draft(0.1), recipe.draft(noise=0.2, noise_seed=2)
    llm = LLM(models.folder(recipe), dtype="float32", max_batch_size=128, draft_replicas=2)
    names = {"draft": models.folder(draft), "policy": policy, "num_speculative_tokens": 3}
    if policy == "sv":
        names["companion"] = models.folder(companion)
    monkeypatch.setattr(building, "measure_latency", lambda *_: fixed_latency())
    llm = llm.with_speculation(unguarded(**names))
    params = [SamplingParams(max_tokens=3, seed=seed) for seed in range(8000)]
    outputs = llm.generate([[1, 2, 3]] * len(params), params)
    said = torch.tensor(token_ids(outputs))
    expected = exact_distribution(models.reference(recipe), [1, 2, 3], SamplingParams(), 3)
    assert chi_square_p_value(sequence_counts(said, 8), expected.joint()) > 1e-4
    assert sum(output.speculation.num_drafted for output in outputs) > 0
    llm.close()


def test_requests_of_a_batch_use_different_policies(replicated, models):
    settings = [RequestSpeculation(policy=("fixed", "svip", "none")[i % 3]) for i in range(20)]
    replicated.change_speculation(policy="fixed")
    outputs = replicated.generate(*varied_work(20), speculation=settings)
    expected = build(models, 1, max_batch_size=7).generate(*varied_work(20), speculation=settings)
    assert token_ids(outputs) == token_ids(expected)


class TestFailures:
    def test_a_replica_that_dies_is_named(self, models):
        llm = build(models, 2, max_batch_size=4)
        for process in processes_of(llm):
            process.kill()
            process.wait()
        with pytest.raises(ReplicaError, match="replica 1 does not answer") as caught:
            llm.generate([[1, 2]] * 4)
        assert caught.value.field == "draft_replicas"
        assert llm.engine.num_unfinished == 0
        llm.close()

    def test_a_replica_that_cannot_load_its_model_is_reported(self):
        spec = ModelSpec("/nowhere", "draft", torch.float32, 16, False)
        with pytest.raises(Exception, match="/nowhere"):
            Replicas([ReplicaSpec(spec, None, "cpu", 2, 16, 1)], ["?"])

    def test_a_replica_with_another_model_is_refused(self, models):
        spec = ModelSpec(models.folder(RECIPE.draft()), "draft", torch.float32, 16, False)
        with pytest.raises(ReplicaError, match="other models"):
            Replicas([ReplicaSpec(spec, None, "cpu", 2, 16, 1)], ["another"])

    def test_replicas_refuse_unsupported_policies_and_overlap(self, models):
        llm = build(models, 1)
        with pytest.raises(InvalidParameterError, match="uses the target while it drafts"):
            check_replicas(llm.load_models(llm.speculation), unguarded("x", policy="oracle"))
        with pytest.raises(InvalidParameterError, match="combined with draft_replicas"):
            build(models, 2, overlap=True)

    @pytest.mark.parametrize("count", [0, -1, 1.5, True])
    def test_invalid_numbers_of_replicas_are_refused(self, models, count):
        with pytest.raises(InvalidParameterError) as caught:
            build(models, count)
        assert caught.value.field == "draft_replicas"


def test_a_cut_draft_is_zero_beyond_its_lengths():
    from draftwise.core.types import Draft, DraftSignals
    from draftwise.engine.parallel.replicas.replica import _cut

    ones = torch.ones(2, 3)
    signals = DraftSignals(torch.ones(2, 3, 4), ones.clone(), ones.clone())
    draft = Draft(ones.long(), (3, 2), torch.ones(2, 4, 4), signals)
    shorter = _cut(draft, (1, 2))
    assert shorter.lengths == (1, 2)
    assert np.array_equal(shorter.tokens, [[1, 0, 0], [1, 1, 0]])
    assert shorter.probs[0, 1:].sum() == 0
    assert shorter.signals.entropy[0].tolist() == [1, 0, 0]
    assert shorter.signals.draft_probs[0, 1:].sum() == 0
