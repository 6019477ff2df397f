"""Prompt log-probabilities equal those of one forward pass of transformers."""

from dataclasses import replace

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.engine.parallel.pinned_threads import shares
from draftwise.outputs import FinishReason

from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .assembly import assemble_recipe, generate, varied_work
from .test_logprobs import assert_told

RECIPE = Recipe(vocab=32, context=128, seed=8)


@torch.no_grad()
def assert_right(model, output, count):
    ids = torch.tensor([output.prompt_token_ids])
    plain = model(input_ids=ids).logits[0].log_softmax(dim=-1)
    first, *told = output.prompt_logprobs
    assert first is None
    assert_told(told, output.prompt_token_ids[1:], plain[:-1], count)


def work(count):
    """Some requests request prompt log-probabilities, and some generate no tokens."""
    prompts, params = varied_work(count)
    asked = (0, None, 3, 20)
    params = [
        replace(
            each,
            prompt_logprobs=asked[index % 4],
            max_tokens=0 if index % 5 == 0 else each.max_tokens,
        )
        for index, each in enumerate(params)
    ]
    return prompts, params


@pytest.mark.slow
@pytest.mark.covering("policy", "overlaps")
@pytest.mark.parametrize("overlaps", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("policy", ["none", "fixed", "sv"])
def test_prompt_logprobs_equal_those_of_one_forward_pass(models, policy, overlaps):
    if overlaps and (shares() is None or policy == "none"):
        pytest.skip("nothing overlaps here")
    engine = assemble_recipe(
        models, RECIPE, 7, policy=policy, num_speculative_tokens=3, overlaps=overlaps
    )
    prompts, params = work(48)
    outputs = generate(engine, prompts, params)
    without = generate(engine, prompts, [replace(each, prompt_logprobs=None) for each in params])
    engine.close()
    for output, plain, each in zip(outputs, without, params, strict=True):
        if policy != "sv" or each.temperature == 0:  # "sv" verifies other tokens as it learns
            assert output.token_ids == plain.token_ids
        assert plain.prompt_logprobs is None
        if each.max_tokens == 0:
            assert output.token_ids == []
            assert output.finish_reason is FinishReason.LENGTH
        if each.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert_right(models.reference(RECIPE), output, each.prompt_logprobs)


def test_a_stream_returns_prompt_logprobs_once(models):
    llm = LLM(
        models.folder(RECIPE),
        unguarded(models.folder(RECIPE.draft()), policy="fixed"),
        dtype="float32",
        max_chunk_tokens=4,
    )
    params = SamplingParams(max_tokens=12, prompt_logprobs=1, seed=0)
    request = llm.engine.add(None, list(range(10)), params)
    told = []
    while request.finish_reason is None:
        llm.engine.step()
        told.append(request.take_new().prompt_logprobs)
    given = [each for each in told if each is not None]
    assert given == [request.output().prompt_logprobs]
    assert len(given[0]) == 10


def test_a_prompt_of_one_token_has_no_logprobs(models):
    llm = LLM(models.folder(RECIPE), dtype="float32")
    output = llm.generate([3], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert output.prompt_logprobs == [None]
    assert output.text == ""
