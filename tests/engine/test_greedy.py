"""At temperature 0 the engine's tokens are exactly those that ``transformers`` generates."""

import functools

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.outputs import FinishReason
from draftwise.policies import POLICIES

from ..stand_ins import SOURCES_WITH_A_MODEL, unguarded
from ..tiny_models import FAMILIES, Recipe
from .assembly import assemble_recipe, generate

VOCAB = 64
NUM_TOKENS = 20
LENGTHS = [1, 2, 3, 5, 7, 8, 11, 40, 13, 16, 17, 20, 23, 29, 31, 34]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
PENALISED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, repetition_penalty=1.4)


def random_prompts(lengths, vocab=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_prompts(LENGTHS)
RECIPE = Recipe("llama", VOCAB)


@pytest.fixture(scope="module")
def generated(models):
    """The output of ``generate`` for each prompt, computed once per model."""

    @functools.cache
    def of(family, repetition_penalty=1.0):
        model = models.reference(Recipe(family, VOCAB))
        texts = []
        for prompt in PROMPTS:
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                repetition_penalty=repetition_penalty,
            )
            texts.append(ids[0, len(prompt) :].tolist())
        return texts

    return of


def engine(models, recipe, draft=None, max_batch_size=16, max_chunk_tokens=512, **speculation):
    config = None
    if draft is not None:
        speculation = {"policy": "fixed", **speculation}
        config = unguarded(draft=models.folder(draft), **speculation)
    return LLM(
        models.folder(recipe),
        config,
        dtype="float32",
        max_batch_size=max_batch_size,
        max_chunk_tokens=max_chunk_tokens,
    )


def token_ids(outputs):
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    return [output.token_ids for output in outputs]


def sources(outputs):
    return {source for output in outputs for source in output.token_sources}


@pytest.mark.covering("family", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_batch_size", "max_chunk_tokens", "num_speculative_tokens"),
    [(16, 512, 3), (16, 9, 5), (5, 33, 1)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_draft(
    models, generated, family, max_batch_size, max_chunk_tokens, num_speculative_tokens
):
    recipe = Recipe(family, VOCAB)
    llm = engine(
        models,
        recipe,
        recipe.draft(),
        max_batch_size,
        max_chunk_tokens,
        num_speculative_tokens=num_speculative_tokens,
    )
    outputs = llm.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == generated(family)
    # Accepted, rejected and bonus tokens must all occur for the test to be meaningful.
    assert sources(outputs) == SOURCES_WITH_A_MODEL


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_draft_at_batch_size_one(models, generated, family):
    recipe = Recipe(family, VOCAB)
    llm = engine(models, recipe, recipe.draft(), max_batch_size=1, num_speculative_tokens=4)
    for index in (0, 4, 7):
        (output,) = llm.generate(PROMPTS[index], GREEDY)
        assert output.token_ids == generated(family)[index]


@pytest.mark.parametrize("policy", POLICIES)
def test_with_every_policy(models, generated, policy):
    """Including policies that are lossless at temperature 0 only."""
    llm = assemble_recipe(models, RECIPE, 16, policy=policy, num_speculative_tokens=4)
    outputs = generate(llm, PROMPTS, [GREEDY] * len(PROMPTS))
    assert token_ids(outputs) == generated("llama")
    assert all(output.speculation.lossless for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_with_every_policy_in_a_batch_with_sampled_requests(models, generated, policy):
    llm = assemble_recipe(models, RECIPE, 16, policy=policy, num_speculative_tokens=4)
    hot = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.3, top_p=0.9, seed=1)
    outputs = token_ids(generate(llm, PROMPTS, [GREEDY, hot] * (len(PROMPTS) // 2)))
    assert outputs[0::2] == generated("llama")[0::2]


def test_with_an_unrelated_draft_of_another_family(models, generated):
    """Few tokens are accepted. The texts do not change."""
    llm = engine(models, Recipe("llama", VOCAB), Recipe("gpt2", VOCAB, seed=5))
    outputs = llm.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == generated("llama")
    assert sum(output.speculation.acceptance_rate for output in outputs) < 0.2 * len(outputs)


def test_with_itself_as_draft(models, generated):
    """Every drafted token is accepted."""
    recipe = Recipe("llama", VOCAB)
    llm = engine(models, recipe, recipe, num_speculative_tokens=3)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == generated("llama")
    assert {output.speculation.acceptance_rate for output in outputs} == {1.0}
    # The first token, then four steps of four tokens, then a draft cut by max_tokens.
    assert {output.speculation.num_steps for output in outputs} == {6}


@pytest.mark.parametrize("draft", [False, True])
def test_with_a_repetition_penalty(models, generated, draft):
    recipe = Recipe("llama", VOCAB)
    llm = engine(models, recipe, recipe.draft() if draft else None)
    assert token_ids(llm.generate(PROMPTS, PENALISED)) == generated("llama", 1.4)


VARIANTS = {
    "tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no shared keys": {"num_key_value_heads": 4},
    "one key for all": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 10},
    "another activation": {"hidden_act": "gelu_pytorch_tanh"},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "another epsilon": {"rms_norm_eps": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_of_llama(models, config):
    recipe = Recipe(vocab=VOCAB, config=config)
    model = models.reference(recipe)
    prompts = PROMPTS[:8]
    llm = engine(models, recipe, recipe.draft(), max_chunk_tokens=19)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        assert prompt + output.token_ids == expected[0].tolist()
