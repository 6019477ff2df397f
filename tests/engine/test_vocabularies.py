"""Logits may be wider or narrower than the tokenizer, because embeddings are padded."""

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.outputs import TokenSource

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .exact import exact_distribution
from .test_lossless import NOT_UNLIKELY

TARGET = Recipe(vocab=48, seed=5, tokenizer=True)
DRAFTS = {
    "wider": Recipe(vocab=64, seed=5, tokenizer=True),
    "narrower": Recipe(vocab=32, seed=5, tokenizer=True),
    "same": TARGET.draft(),
}
# Some tokens are beyond the vocabularies of the tokenizer and of the narrower draft.
PROMPTS = [[1, 40, 3], [47], [2, 3, 4], [31, 32, 33, 45]]


def build(models, draft, **options):
    config = None
    if draft is not None:
        config = unguarded(models.folder(DRAFTS[draft]), num_speculative_tokens=3, policy="fixed")
    return LLM(models.folder(TARGET), config, dtype="float32", **options)


@pytest.mark.covering("draft", "max_chunk_tokens")
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("max_chunk_tokens", [512, 3])
def test_greedy_texts_are_unchanged(models, draft, max_chunk_tokens):
    params = SamplingParams(max_tokens=40, temperature=0)
    expected = build(models, None).generate(PROMPTS, params)
    assert max(token for output in expected for token in output.token_ids) >= 32
    outputs = build(models, draft, max_chunk_tokens=max_chunk_tokens).generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert TokenSource.CORRECTION in {s for output in outputs for s in output.token_sources}


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["wider", "narrower"])
def test_sampled_texts_follow_the_target(models, draft):
    llm = build(models, draft, max_batch_size=256)
    prompt, num_tokens = [1, 40, 3], 2
    params = [SamplingParams(max_tokens=num_tokens + 1, seed=seed) for seed in range(8_000)]
    requests = [llm.engine.add(None, prompt, each) for each in params]
    while llm.engine.num_unfinished:
        llm.engine.step()
    said = [request.output().token_ids[:num_tokens] for request in requests]
    expected = exact_distribution(models.reference(TARGET), prompt, params[0], num_tokens)
    counts = sequence_counts(torch.tensor(said), TARGET.vocab)
    assert chi_square_p_value(counts, expected.joint()) > NOT_UNLIKELY
    assert sum(request.stats.num_accepted for request in requests) > 0
