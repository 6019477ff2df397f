"""Prefix caching: the same outputs, less computed, and nothing shared that must not be."""

import itertools
import math

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.engine.verification import TargetVerifier
from draftwise.errors import InvalidParameterError, NumericalError
from draftwise.models.prefix_store import BLOCK_SIZE, PrefixStore

from ..tiny_models import Recipe

CONTEXT = 256
FAMILIES = {
    "llama": {},
    "gemma3_text": {"sliding_window": 24},
    "mistral": {"sliding_window": 40},
    "gpt_oss": {"sliding_window": 16},
    "gpt2": {},
}
PREFIX = [(5 * i * i + i) % 16 for i in range(100)]
PROMPTS = [[*PREFIX[: 20 * (1 + i % 5)], *[(i * j + 3) % 16 for j in range(i)]] for i in range(12)]
POLICIES = {
    "none": {},
    "fixed": {"num_speculative_tokens": 3},
    "svip": {},
    "sv": {"companion": True},
    "adaptive": {},
}


def recipe(family):
    return Recipe(family, vocab=16, context=CONTEXT, seed=4, config=FAMILIES.get(family, {}))


def build(models, family="llama", policy="none", **options):
    speculation = None
    if policy != "none":
        draft = models.folder(recipe(family).draft())
        speculation = {"draft": draft, "policy": policy, "guard": False}
        settings = dict(POLICIES[policy])
        if settings.pop("companion", False):
            speculation["companion"] = models.folder(recipe(family).draft(0.05))
        speculation |= settings
    options = {"max_chunk_tokens": 32, "dtype": "float32", **options}
    return LLM(models.folder(recipe(family)), speculation, **options)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


# These families run through their own modules, which takes longer.
SLOW_FAMILIES = {"gpt2", "gpt_oss"}


@pytest.mark.covering("family", "batch_size", "policy")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.slow) if each in SLOW_FAMILIES else each
        for each in FAMILIES
    ],
)
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("policy", ["none", "fixed"])
def test_outputs_are_those_without_a_cache(models, family, policy, batch_size):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = build(models, family, policy, max_batch_size=batch_size)
    plain = build(models, family, policy, max_batch_size=batch_size, enable_prefix_caching=False)
    expected = plain.generate(PROMPTS, params)
    assert all(output.num_cached_tokens == 0 for output in expected)
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params)
        assert tokens_of(outputs) == tokens_of(expected)
    assert all(
        output.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    )
    # The next turn of a chat begins with the last one.
    turns = [[*p, *o.token_ids, 7, 8] for p, o in zip(PROMPTS, outputs, strict=True)]
    longer = llm.generate(turns, params)
    assert tokens_of(longer) == tokens_of(plain.generate(turns, params))
    if batch_size > 1:  # with one request, not all of them fit the store
        assert all(o.num_cached_tokens >= len(p) for p, o in zip(PROMPTS, longer, strict=True))


@pytest.mark.slow
@pytest.mark.covering("policy", "temperature")
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_seeded_outputs_of_every_policy(models, policy, temperature):
    params = [
        SamplingParams(temperature=temperature, max_tokens=30, seed=at, ignore_eos=True)
        for at in range(len(PROMPTS))
    ]
    llm, plain = (
        build(models, policy=policy, enable_prefix_caching=switch) for switch in (True, False)
    )
    llm.generate(PROMPTS, params)
    outputs = llm.generate(PROMPTS, params)
    assert all(output.num_cached_tokens for output in outputs if len(output.prompt_token_ids) > 16)
    if policy in ("none", "fixed"):  # the others depend on step times
        assert tokens_of(outputs) == tokens_of(plain.generate(PROMPTS, params))


@pytest.fixture
def computed(monkeypatch):
    """Number of tokens that the target computed."""
    counts = []
    verify = TargetVerifier.verify

    def counting(self, batch, plan):
        counts.append(sum(chunk.end - chunk.start for chunk in batch.chunks))
        return verify(self, batch, plan)

    monkeypatch.setattr(TargetVerifier, "verify", counting)
    return counts


def test_requests_of_one_call_share_their_prefix(models, computed):
    llm = build(models, max_batch_size=8)
    prompts = [[*PREFIX, at, at] for at in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=2))
    assert sum(computed) < 2 * len(PREFIX) + 8 * (BLOCK_SIZE + 2)
    assert llm.engine.prefix_stats.num_queried == sum(map(len, prompts))
    assert llm.engine.prefix_stats.num_hits == sum(map(len, prompts)) - sum(computed)


def test_salts_share_nothing(models, computed):
    llm = build(models)
    for salt in ("", "a", "b"):
        llm.generate([PREFIX], SamplingParams(max_tokens=1, cache_salt=salt))
    assert sum(computed) == 3 * len(PREFIX)
    (output,) = llm.generate([PREFIX], SamplingParams(max_tokens=1, cache_salt="b"))
    assert output.num_cached_tokens == 96


def test_prompt_logprobs_are_computed(models):
    llm = build(models)
    first, second = (
        llm.generate([PREFIX], SamplingParams(max_tokens=1, prompt_logprobs=1))[0] for _ in range(2)
    )
    assert second.num_cached_tokens == 0
    assert first.prompt_logprobs == second.prompt_logprobs
    assert llm.generate([PREFIX], SamplingParams(max_tokens=1))[0].num_cached_tokens == 96


def test_a_small_memory_drops_old_prefixes(models):
    """The prompts have 160 different blocks."""
    llm, plain = (
        build(models, max_batch_size=2, cache_gib=512 * 600 / 2**30, enable_prefix_caching=switch)
        for switch in (True, False)
    )
    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [[at % 16, at // 4, *PREFIX[:60]] for at in range(40)]
    for _ in range(2):
        assert tokens_of(llm.generate(prompts, params)) == tokens_of(
            plain.generate(prompts, params)
        )
    stores = llm.engine._prefixes._all_stores()
    assert 0 < len(stores[0]) <= stores[0].num_blocks < 100


@pytest.mark.covering("policy", "method", "at")
@pytest.mark.parametrize("policy", ["none", "fixed"])
@pytest.mark.parametrize("method", ["restore", "store"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupt_leaves_right_outputs(models, monkeypatch, policy, method, at):
    llm = build(models, policy=policy)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = tokens_of(build(models, policy=policy).generate(PROMPTS, params))
    original, calls = getattr(PrefixStore, method), itertools.count(1)

    def interrupted(self, *args):
        if next(calls) == at:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(PrefixStore, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params)
    for _ in range(2):
        assert tokens_of(llm.generate(PROMPTS, params)) == expected


def test_a_changed_policy_keeps_drafting_right(models):
    """Without a draft, only the target's store has the output. The draft reads it itself."""
    llm = build(models, policy="fixed")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.change_speculation(policy="none")
    (first,) = llm.generate([PREFIX], params)
    llm.change_speculation(policy="fixed")
    prompt = [*PREFIX, *first.token_ids, 3]
    (second,) = llm.generate([prompt], params)
    assert second.num_cached_tokens > len(PREFIX)
    assert second.speculation.num_verified > 0
    (expected,) = build(models, enable_prefix_caching=False).generate([prompt], params)
    assert second.token_ids == expected.token_ids


def test_the_store_is_limited(models):
    llm = build(models, max_batch_size=4)
    assert llm.engine._prefixes._target.num_blocks <= 16 * CONTEXT // BLOCK_SIZE


def test_a_request_that_failed_stores_nothing_more(models):
    """Its keys and values may be NaN."""
    llm = build(models)
    with torch.no_grad():
        llm.target.model._model.get_input_embeddings().weight[15] = math.nan
    with pytest.raises(NumericalError):
        llm.generate([[*range(15), 15] * 6], SamplingParams(max_tokens=1))
    stored = llm.engine._prefixes._target
    prompt = [*range(15), 15] * 6
    assert stored.find(prompt, "", len(prompt)) < len(prompt) - BLOCK_SIZE


def test_long_drafts_do_not_skip_the_store(models):
    """A step adds more tokens than a block has, and rings soon overwrite what is not stored."""
    recipe = Recipe("gemma3_text", vocab=16, context=2048, seed=4, config={"sliding_window": 24})
    speculation = {"draft": "suffix", "policy": "fixed", "num_speculative_tokens": 40}
    llm = LLM(models.folder(recipe), speculation, max_chunk_tokens=300, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True, logit_bias={3: 50.0})
    (first,) = llm.generate([PREFIX], params)
    assert first.speculation.num_accepted > 20 * first.speculation.num_steps
    text = [*PREFIX, *first.token_ids]
    (second,) = llm.generate([text], SamplingParams(max_tokens=1))
    assert second.num_cached_tokens > len(text) - 2 * BLOCK_SIZE


def test_switches_are_checked(models):
    with pytest.raises(InvalidParameterError, match="enable_prefix_caching"):
        build(models, enable_prefix_caching="yes")
