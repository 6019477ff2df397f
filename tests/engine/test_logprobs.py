"""Log-probabilities are the target's own for tokens of every source."""

from dataclasses import replace

import pytest
import torch

from draftwise import LLM, SamplingParams, StructuredOutputs
from draftwise.engine import acceptance
from draftwise.engine.parallel.pinned_threads import shares
from draftwise.outputs import FinishReason, TokenSource

from ..stand_ins import SOURCES_WITH_A_MODEL, unguarded
from ..tiny_models import Recipe
from .assembly import assemble_recipe, generate, varied_work
from .test_failures import BROKEN, break_token

RECIPE = Recipe(vocab=32, seed=8, tokenizer=True, config={"eos_token_id": 1})


def work(count):
    """Every kind of request. Most of them request log-probabilities."""
    prompts, params = varied_work(count)
    asked = (0, None, 3, 20, 1)
    controls = (
        {},
        {"top_k": 5, "top_p": 0.9},
        {"logit_bias": {4: 5.0, 7: -100.0}},
        {"repetition_penalty": 1.5, "temperature": 0.7},
    )
    return prompts, [
        replace(each, logprobs=asked[index % 5], **controls[index % 4])
        for index, each in enumerate(params)
    ]


@torch.no_grad()
def expected(model, output):
    """``[num_tokens, vocab]`` by transformers, reading prompt and output at once."""
    ids = torch.tensor([output.prompt_token_ids + output.token_ids])
    logits = model(input_ids=ids).logits[0]
    return logits.log_softmax(dim=-1)[len(output.prompt_token_ids) - 1 : -1]


def assert_told(told_of_tokens, tokens, every, count):
    """Each token's log-probability and rank, and the most likely tokens, are those of a pass."""
    for told, token, logp in zip(told_of_tokens, tokens, every, strict=True):
        assert told.logprob == pytest.approx(float(logp[token]), abs=2e-4)
        assert told.rank == int((logp > logp[token]).sum()) + 1
        best = logp.topk(count)
        assert [each for each, _ in told.top] == best.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def assert_right(model, output, count):
    assert_told(output.logprobs, output.token_ids, expected(model, output), count)


def assert_all_right(models, outputs, params):
    model = models.reference(RECIPE)
    for output, each in zip(outputs, params, strict=True):
        if each.logprobs is None:
            assert output.logprobs is None
        else:
            assert_right(model, output, each.logprobs)


@pytest.mark.slow
@pytest.mark.covering("policy", "overlaps", "native")
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("policy", ["none", "fixed", "svip", "sv", "staged", "tetris"])
def test_logprobs_equal_those_of_one_forward_pass(models, monkeypatch, policy, overlaps, native):
    if overlaps and (shares() is None or policy in ("none", "tetris")):
        pytest.skip("nothing overlaps here")
    if not native:
        monkeypatch.setattr(acceptance, "library_for", lambda _: None)
    engine = assemble_recipe(
        models, RECIPE, 7, policy=policy, num_speculative_tokens=3, overlaps=overlaps
    )
    prompts, params = work(60)
    outputs = generate(engine, prompts, params)
    engine.close()
    assert_all_right(models, outputs, params)
    if policy != "none":
        sources = {
            source
            for output in outputs
            if output.logprobs is not None
            for source in output.token_sources
        }
        assert sources == SOURCES_WITH_A_MODEL


def test_batches_of_one_kind_of_request(models):
    """All greedy or all sampled, without anything that changes logits."""
    engine = assemble_recipe(models, RECIPE, 4, policy="fixed", num_speculative_tokens=3)
    for temperature in (0.0, 1.0):
        params = [SamplingParams(12, temperature, logprobs=2, seed=i) for i in range(9)]
        assert_all_right(models, generate(engine, [[i, 3] for i in range(9)], params), params)


@pytest.mark.slow
def test_logprobs_with_replicas(models):
    speculation = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
    llm = LLM(
        models.folder(RECIPE), speculation, dtype="float32", max_batch_size=5, draft_replicas=2
    )
    try:
        prompts, params = work(30)
        assert_all_right(models, llm.generate(prompts, params), params)
    finally:
        llm.close()


def build(models, **options):
    speculation = unguarded(models.folder(RECIPE), num_speculative_tokens=5, policy="fixed")
    return LLM(models.folder(RECIPE), speculation, dtype="float32", **options)


def test_texts_that_end_within_a_draft_have_logprobs_of_every_token(models):
    """The draft model is the target itself, so all its tokens are accepted."""
    llm = build(models, max_batch_size=4)
    plain = SamplingParams(24, 1.0, logprobs=2)
    prompts = [[index % 30] for index in range(40)]
    params = [replace(plain, seed=index, stop=("a", "e", ":")) for index in range(40)]
    outputs = llm.generate(prompts, params)
    stopped = [
        output
        for output in outputs
        if output.finish_reason is FinishReason.STOP
        and output.token_sources[-1] is TokenSource.DRAFT
    ]
    assert stopped
    assert_all_right(models, outputs, params)


def test_a_grammar_does_not_change_logprobs(models):
    llm = build(models, max_batch_size=4)
    grammar = StructuredOutputs(regex="[a-h]{3,9}")
    params = [
        SamplingParams(24, 1.0, logprobs=3, seed=index, structured_outputs=grammar)
        for index in range(12)
    ]
    outputs = llm.generate([[index] for index in range(12)], params)
    assert_all_right(models, outputs, params)
    assert any(told.rank > 8 for output in outputs for told in output.logprobs)


def test_a_stream_returns_logprobs_with_the_tokens(models):
    llm = build(models, max_batch_size=4)
    prompts, params = work(20)
    outputs = llm.generate(prompts, params)
    told = [[] for _ in prompts]
    for piece in llm.stream(prompts, params):
        if params[piece.index].logprobs is None:
            assert piece.logprobs is None
        else:
            assert len(piece.logprobs) == len(piece.token_ids)
            told[piece.index] += piece.logprobs
    for output, each in zip(outputs, told, strict=True):
        assert [t.rank for t in each] == [t.rank for t in output.logprobs or ()]


def test_a_failed_request_has_logprobs_of_its_tokens(models):
    llm = build(models, max_batch_size=3)
    break_token(llm.target.model, BROKEN)
    biased = SamplingParams(30, logit_bias={BROKEN: 3.0}, seed=0, logprobs=1)
    quiet = SamplingParams(8, logit_bias={BROKEN: -100.0}, seed=0, logprobs=1)
    outputs = llm.generate([[1, 2, 3], [2, BROKEN], [4, 5]], [biased, biased, quiet])
    assert [output.finish_reason for output in outputs[:2]] == [FinishReason.ERROR] * 2
    for output in outputs:
        assert len(output.logprobs) == len(output.token_ids)
    assert len(outputs[2].token_ids) > 0
