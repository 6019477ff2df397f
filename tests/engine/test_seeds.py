"""The same seed gives the same text, alone and in a batch."""

import pytest

from draftwise import LLM, SamplingParams

from ..stand_ins import unguarded
from ..tiny_models import Recipe

RECIPE = Recipe(vocab=32, seed=2)
EVERYTHING = {
    "temperature": 0.9,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {4: 1.5, 7: -2.0},
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def build(models, speculation=True, **options):
    config = unguarded(models.folder(RECIPE.draft()), num_speculative_tokens=3, policy="fixed")
    return LLM(models.folder(RECIPE), config if speculation else None, dtype="float32", **options)


def others():
    """31 requests of all kinds. Some end long before the last one."""
    for index in range(31):
        prompt = [(7 * index + 3 * i) % 32 for i in range(1 + index % 13)]
        kind = [{}, {"temperature": 0}, {"temperature": 1.4, "top_k": 9}, EVERYTHING][index % 4]
        yield prompt, SamplingParams(max_tokens=1 + index, seed=index, **kind)


@pytest.mark.slow
@pytest.mark.covering("kind", "speculation", "place")
@pytest.mark.parametrize("kind", [{}, {"temperature": 0.7, "top_p": 0.9}, EVERYTHING], ids=len)
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_a_seed_gives_the_same_text_alone_and_in_a_batch(models, kind, speculation, place):
    params = SamplingParams(max_tokens=30, seed=2**64 - 5, **kind)
    alone = build(models, speculation, max_batch_size=1).generate(PROMPT, params)[0]
    batch = list(others())
    batch.insert(place, (PROMPT, params))
    llm = build(models, speculation, max_batch_size=32, max_chunk_tokens=40)
    among = llm.generate(*map(list, zip(*batch, strict=True)))[place]
    assert among.token_ids == alone.token_ids
    assert among.token_sources == alone.token_sources
    # Again, in a cache slot that another request has used.
    assert llm.generate(PROMPT, params)[0].token_ids == alone.token_ids


def test_other_seeds_give_other_texts(models):
    llm = build(models)
    params = [SamplingParams(max_tokens=30, seed=seed) for seed in (0, 1, -1, 2**32, 2**33)]
    texts = [output.token_ids for output in llm.generate([PROMPT] * 5, params)]
    assert len(set(map(tuple, texts))) == 5


def test_negative_seeds_equal_unsigned_seeds_of_the_same_bits(models):
    llm = build(models)
    params = [SamplingParams(max_tokens=30, seed=seed) for seed in (-1, 2**64 - 1)]
    first, second = llm.generate([PROMPT] * 2, params)
    assert first.token_ids == second.token_ids


def test_requests_without_a_seed_get_random_seeds(models):
    llm = build(models)
    first, second = llm.generate([PROMPT] * 2, SamplingParams(max_tokens=30))
    assert first.token_ids != second.token_ids


def test_greedy_texts_need_no_seed(models):
    llm = build(models)
    first, second = llm.generate([PROMPT] * 2, SamplingParams(max_tokens=30, temperature=0))
    assert first.token_ids == second.token_ids


@pytest.mark.covering("kind", "method")
@pytest.mark.parametrize("kind", [{}, {"temperature": 0}, EVERYTHING], ids=len)
@pytest.mark.parametrize("method", ["block", "token"])
def test_a_draft_equal_to_the_target_is_always_accepted(models, kind, method):
    """Draft and target use the same sampling parameters and the same history."""
    folder = models.folder(RECIPE)
    config = unguarded(folder, num_speculative_tokens=4, verification=method, policy="fixed")
    llm = LLM(folder, config, dtype="float32")
    params = [SamplingParams(max_tokens=40, seed=seed, **kind) for seed in range(30)]
    outputs = llm.generate([PROMPT] * 30, params)
    verified = sum(output.speculation.num_verified for output in outputs)
    accepted = sum(output.speculation.num_accepted for output in outputs)
    # Rounding may make p slightly smaller than q. Then one token in a million is rejected.
    assert accepted >= verified - 1 > 500
