"""Models compared with transformers, most of which attend to a window in some layers."""

import pytest

from draftwise import LLM, SamplingParams
from draftwise.engine import memory
from draftwise.errors import DraftwiseWarning
from draftwise.models.prefix_store import BLOCK_SIZE

from ..architectures import (
    ALL,
    CONTEXT,
    NUM_TOKENS,
    PROMPTS,
    WINDOW,
    WITH_WINDOWS,
    continuation,
    recipe,
)
from ..stand_ins import unguarded
from ..tiny_models import Recipe


@pytest.mark.covering("family", "policy", "batch_size", "is_caching")
@pytest.mark.slow
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("policy", ["none", "fixed"])
@pytest.mark.parametrize("family", ALL)
def test_greedy_texts_equal_those_of_transformers(models, family, policy, batch_size, is_caching):
    """Prompts and outputs cross the window many times, and rings overwrite old tokens."""
    each = ALL[family]
    speculation = unguarded(models.folder(each.draft()), policy=policy, num_speculative_tokens=3)
    llm = LLM(
        models.folder(each),
        speculation,
        dtype="float32",
        max_batch_size=batch_size,
        max_chunk_tokens=16,
        enable_prefix_caching=is_caching,
    )
    assert (min(llm.engine._verifier._cache.sizes) < CONTEXT) == (family in WITH_WINDOWS)
    indices = range(len(PROMPTS)) if batch_size > 1 else [3, 12]
    prompts = [PROMPTS[index] for index in indices]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    # With a cache, the second turn begins with what the first one stored.
    for turn in range(1 + is_caching):
        outputs = llm.generate(prompts, params)
        for index, output in zip(indices, outputs, strict=True):
            assert output.token_ids == continuation(models, family, index)
        are_found = [output.num_cached_tokens > 0 for output in outputs]
        if turn:
            assert are_found == [len(prompt) > BLOCK_SIZE for prompt in prompts]
    assert any(are_found) == is_caching


def test_a_draft_that_is_far_behind_catches_up(models):
    """A pass reads no more new tokens than a ring can hold."""
    target, draft = Recipe(vocab=16, context=CONTEXT), WITH_WINDOWS["mistral"]
    speculation = unguarded(models.folder(draft), policy="fixed", num_speculative_tokens=3)
    llm = LLM(models.folder(target), speculation, dtype="float32", max_chunk_tokens=16)
    alone = LLM(models.folder(target), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with llm.engine.turns:
        llm.change_speculation(policy="none")
        request = llm.engine.add(None, PROMPTS[-1], params)
        while len(request.tokens) < 150:
            llm.engine.step()
        llm.change_speculation(policy="fixed")
        while llm.engine.num_unfinished:
            llm.engine.step()
    (output,) = alone.generate([PROMPTS[-1]], params)
    assert request.output().token_ids == output.token_ids
    assert request.stats.num_verified > 0


def test_a_disabled_window_is_no_limit(models):
    each = recipe("qwen2", sliding_window=WINDOW, use_sliding_window=False)
    llm = LLM(models.folder(each), dtype="float32")
    assert all(layer.window is None for layer in llm.target.model.layers)


def test_a_context_that_does_not_fit_is_shortened(models, monkeypatch):
    """A token of this model takes 1 KiB of float32 keys and values."""
    each = Recipe(vocab=16, context=4096, config={"head_dim": 32})
    monkeypatch.setattr(memory, "_available_bytes", lambda: 2 * 2**20)
    with pytest.warns(DraftwiseWarning, match="max_model_len is 1024"):
        llm = LLM(models.folder(each), dtype="float32")
    assert llm.target.max_model_len == llm.engine.max_model_len == 1024
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(output.token_ids) == 5
