"""No token ends a text before ``min_tokens``. Texts follow the masked target."""

from dataclasses import replace

import pytest
import torch

from draftwise import LLM, SamplingParams, StructuredOutputs
from draftwise.engine import acceptance, companion
from draftwise.engine.parallel.pinned_threads import shares
from draftwise.outputs import FinishReason

from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .assembly import assemble_recipe, generate, token_ids, varied_work
from .test_lossless import NOT_UNLIKELY, Case
from .test_stopping import CONTEXT, PROMPT, TEXT, build, folders, greedy, text_of  # noqa: F401

RECIPE = Recipe(vocab=16, seed=5, config={"eos_token_id": 1})
POLICIES = ["none", "fixed", "svip", "sv", "staged", "adaptive", "tetris"]


def work(count):
    """Greedy and sampled requests. Most would often end early; some may end early."""
    prompts, params = varied_work(count)
    stops = ((2,), (), (0, 3, 4, 5, 6, 7), (8,))
    return prompts, [
        replace(
            each,
            max_tokens=14,
            min_tokens=(0, 5, 9, 14)[index % 4],
            stop_token_ids=stops[index % 3],
            logit_bias={1: 4.0} if index % 2 else {},
            logprobs=index % 2,
        )
        for index, each in enumerate(params)
    ]


@torch.no_grad()
def reference(model, prompt, params, eos):
    """The greedy text, token by token, without the engine."""
    tokens, ends = list(prompt), {eos, *params.stop_token_ids}
    said = []
    while len(said) < params.max_tokens:
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if len(said) < params.min_tokens:
            logits[list(ends)] = float("-inf")
        logits -= params.presence_penalty * torch.bincount(
            torch.tensor(said, dtype=torch.long), minlength=len(logits)
        ).clamp(max=1)
        tokens.append(int(logits.argmax()))
        said.append(tokens[-1])
        if said[-1] in ends:
            break
    return said


@pytest.mark.slow
@pytest.mark.covering("policy", "overlaps", "native")
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_texts_are_those_of_the_masked_target(models, monkeypatch, policy, overlaps, native):
    if overlaps and (shares() is None or policy in ("none", "tetris")):
        pytest.skip("nothing overlaps here")
    if not native:
        for module in (acceptance, companion):
            monkeypatch.setattr(module, "library_for", lambda _: None)
    engine = assemble_recipe(
        models, RECIPE, 7, policy=policy, num_speculative_tokens=3, overlaps=overlaps
    )
    prompts, params = work(36)
    params = [replace(each, temperature=0) for each in params]
    outputs = generate(engine, prompts, params)
    engine.close()
    model = models.reference(RECIPE)
    early = 0
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert output.token_ids == reference(model, prompt, each, 1)
        without = reference(model, prompt, replace(each, min_tokens=0), 1)
        early += len(without) <= each.min_tokens
    assert early > 8  # otherwise the test would check little
    if policy != "none":
        assert sum(output.speculation.num_accepted for output in outputs) > 20


def test_sampled_texts_have_the_minimum_length(models):
    engine = assemble_recipe(models, RECIPE, 7, policy="fixed", num_speculative_tokens=3)
    prompts, params = work(60)
    outputs = generate(engine, prompts, params)
    for each, output in zip(params, outputs, strict=True):
        ends = {1, *each.stop_token_ids}
        assert not ends & set(output.token_ids[: each.min_tokens])
        assert len(output.token_ids) >= each.min_tokens
        if output.finish_reason is FinishReason.STOP:
            assert output.token_ids[-1] in ends
    assert any(output.finish_reason is FinishReason.STOP for output in outputs)
    unmasked = [replace(each, min_tokens=0) for each in params]
    assert token_ids(generate(engine, prompts, unmasked)) != token_ids(outputs)


# Two tokens end the text. They are masked for the first two tokens.
STOP = {"stop_token_ids": (1, 6), "min_tokens": 2}
SETTINGS = (
    ([1, 2, 3], SamplingParams(**STOP)),
    ([3, 0, 2], SamplingParams(temperature=0.7, top_k=4, **STOP)),
    ([1], SamplingParams(temperature=1.5, top_p=0.85, min_p=0.05, **STOP)),
    ([0, 3], SamplingParams(presence_penalty=0.5, logit_bias={1: 2.0}, **STOP)),
)


@pytest.mark.slow
@pytest.mark.covering("policy", "method")
@pytest.mark.parametrize("method", ["block", "token"])
@pytest.mark.parametrize("policy", ["fixed", "svip", "sv", "staged"])
def test_texts_follow_the_masked_target(models, policy, method):
    """Compare three tokens: two with the mask, and one that may end the text."""
    case = Case(policy, method, 3, num_tokens=3, num_requests=6_000, settings=SETTINGS)
    tokens, requests = case.sampled(models)
    assert all(request.stats.lossless for request in requests)
    assert sum(request.stats.num_accepted for request in requests) > 1000
    assert (tokens[..., 2] == 1).any()
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", "perfect", "broken"])
def test_stop_strings_are_found_only_after_the_minimum_length(folders, draft):  # noqa: F811
    """As in vLLM, they are not found in the text of the first tokens, nor across its end."""
    llm = build(folders, draft)
    whole = text_of(40)
    for num_tokens in range(1, 18):
        # An incomplete character has no text yet.
        exempt = len(text_of(num_tokens).rstrip("\ufffd"))
        for stop in ("h", "gf", "€ed", "ñ", "\nh"):
            params = greedy(stop=stop, min_tokens=num_tokens)
            output = llm.generate(PROMPT, params)[0]
            assert output.text == whole[: whole.index(stop, exempt)]
            pieces = list(llm.stream(PROMPT, params))
            assert "".join(piece.text for piece in pieces) == output.text


def test_a_complete_grammar_ends_a_text_before_the_minimum_length(models):
    recipe = Recipe(vocab=32, seed=8, tokenizer=True, config={"eos_token_id": 1})
    speculation = unguarded(models.folder(recipe.draft()), policy="fixed")
    llm = LLM(models.folder(recipe), speculation, dtype="float32")

    def said(regex, **options):
        grammar = StructuredOutputs(regex=regex)
        params = SamplingParams(structured_outputs=grammar, max_tokens=24, seed=0, **options)
        return llm.generate("abc", params)[0]

    assert said("abc", min_tokens=12).text == "abc"
    longer = said("[abc]+", min_tokens=12)
    assert longer.error is None
    assert len(longer.token_ids) >= 12
    assert 1 not in longer.token_ids[:12]
