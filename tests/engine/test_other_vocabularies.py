"""A draft and a companion may have other tokenizers than the target's."""

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.engine.cached_model import ForwardInput
from draftwise.engine.mapped_model import TranslatedModel
from draftwise.errors import InvalidParameterError, VocabularyMismatchError, VocabularyWarning
from draftwise.models.loading import load_model
from draftwise.models.vocabulary_match import match_vocabulary

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .exact import exact_distribution, process
from .recording import RecordedEngine
from .test_lossless import HOT, NOT_UNLIKELY, PENALISED, PLAIN

# Shared with the draft: a, b, c, the space. "ab", "▁c" and "cc" are several tokens of the draft.
TARGET = Recipe(vocab=8, seed=3, pieces=("a", "b", "ab", "▁", "c", "▁c", "<|end|>", "cc"))
DRAFT = Recipe(vocab=7, seed=3, pieces=("▁", "c", "bc", "b", "a", "ba", "<|end|>"))
# Shared with the target: a, c and their doubles. It writes "b" as a byte.
COMPANION = Recipe(vocab=6, seed=3, pieces=("<0x62>", "a", "cc", "c", "aa", "▁c"))
STRANGER = Recipe(vocab=3, seed=3, pieces=("x", "y", "z"))
PROMPTS = [[2, 1, 3], [5, 0], [6, 7, 7, 4, 3, 0, 2], [1], [6]]
# The target's tokens in those of each model, and the tokens that stand for the same bytes.
SPELLINGS = {
    "draft": [[4], [3], [4, 3], [0], [1], [0, 1], [6], [1, 1]],
    "companion": [[1], [0], [1, 0], [], [3], [5], [], [2]],
}
SHARED = {"draft": {4: 0, 3: 1, 0: 3, 1: 4, 6: 6}, "companion": {1: 0, 0: 1, 3: 4, 5: 5, 2: 7}}
# The prompts are "abb ", " ca", "<|end|>ccccc aab", "b" and "<|end|>". Special tokens and
# spaces are left out where a model has none.
OWN_PROMPTS = {
    "draft": [[4, 3, 3, 0], [0, 1, 4], [6, 1, 1, 1, 1, 1, 0, 4, 4, 3], [3], [6]],
    "companion": [[1, 0, 0], [3, 1], [2, 2, 3, 4, 0], [0], []],
}


def build(models, draft=DRAFT, companion=None, policy="fixed", **options):
    speculation = None
    if draft is not None:
        speculation = unguarded(
            models.folder(draft),
            num_speculative_tokens=4,
            policy=policy,
            companion=None if companion is None else models.folder(companion),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VocabularyWarning)
        return LLM(models.folder(TARGET), speculation, dtype="float32", **options)


def matched(models, *companions):
    """The loaded target, draft and companion, with translators."""
    loaded = [
        load_model(models.folder(recipe), "model", torch.float32, torch.device("cpu"))
        for recipe in (TARGET, DRAFT, *companions)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VocabularyWarning)
        return [loaded[0], *(match_vocabulary(loaded[0], each, "draft") for each in loaded[1:])]


def texts(llm, params):
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def test_drafted_tokens_of_several_own_tokens_fit_in_a_pass(models):
    """Of a companion with a sliding window, a pass reads a limited number of tokens."""
    recipe = replace(COMPANION, family="gemma3_text", context=256)
    target, own = (
        load_model(models.folder(each), "model", torch.float32, torch.device("cpu"))
        for each in (TARGET, recipe)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VocabularyWarning)
        translator = match_vocabulary(target, own, "companion").translator
    drafted = [2, 2, 7, 2]  # seven tokens of the companion
    text = [(7 * i + i * i) % 8 for i in range(160)]
    for count in range(31, 132):
        cached = TranslatedModel(own.model, own.model.new_cache(1, 256, 64), 8, translator)
        request = SimpleNamespace(tokens=text[:count], num_prompt_tokens=20, cache_slot=0)
        cached.admit(request)
        cached.read([ForwardInput(request, 30)])
        logits, _ = cached.read([ForwardInput(request, count, drafted, 5)])
        assert logits.shape == (5, 8)


@pytest.mark.covering("companion", "caches", "max_chunk_tokens")
@pytest.mark.parametrize("max_chunk_tokens", [512, 2])
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("companion", [None, COMPANION], ids=["alone", "scored"])
def test_greedy_texts_are_the_targets(models, companion, caches, max_chunk_tokens):
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = texts(build(models, None), params)
    policy = "fixed" if companion is None else "staged"
    llm = build(
        models,
        companion=companion,
        policy=policy,
        enable_prefix_caching=caches,
        max_chunk_tokens=max_chunk_tokens,
    )
    for _ in range(2):  # the second time, prompts and outputs are in the prefix cache
        assert texts(llm, params) == expected
    drafted = llm.generate(PROMPTS, params)
    assert sum(output.speculation.num_accepted for output in drafted) > 0
    said = {token for text in expected for token in text}
    assert said & {2, 5, 7}, "the test says nothing if all tokens are shared"


@torch.no_grad()
def expected_probs(models, role, seen):
    """``[drafted, vocab]`` a model's distribution at each drafted position, from a fresh forward.

    The model reads the prompt in its own tokens, and each later token of the target spelled out.
    """
    spelling, shared = SPELLINGS[role], SHARED[role]
    model = models.reference({"draft": DRAFT, "companion": COMPANION}[role])
    prompt = seen.request.num_prompt_tokens
    ids = OWN_PROMPTS[role][PROMPTS.index(seen.tokens[:prompt])].copy()
    ids += [own for token in seen.tokens[prompt:] for own in spelling[token]]
    rows = []
    for index, token in enumerate(seen.drafted):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        row = torch.full((1, TARGET.vocab), -torch.inf)
        for own, target in shared.items():
            row[0, target] = logits[own]
        context = [*seen.tokens, *seen.drafted[:index]]
        output = torch.tensor([context[prompt:]], dtype=torch.long)
        params = seen.request.params
        params = replace(params, temperature=params.temperature or 1.0)
        rows.append(process(row, torch.tensor([context]), output, params))
        ids += spelling[token]
    return torch.cat(rows) if rows else torch.zeros(0, TARGET.vocab)


@pytest.mark.covering("asks", "max_chunk_tokens")
@pytest.mark.parametrize("max_chunk_tokens", [512, 3])
@pytest.mark.parametrize("asks", [lambda step: True, lambda step: step % 3 == 0])
def test_distributions_are_those_after_the_text_in_own_tokens(models, asks, max_chunk_tokens):
    options = {"max_batch_size": 4, "max_chunk_tokens": max_chunk_tokens}
    run = RecordedEngine(*matched(models, COMPANION), options=options, asks=asks)
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.8}, {"frequency_penalty": 0.5}]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(12)]
    params = [
        SamplingParams(max_tokens=6 + 3 * index, seed=index, ignore_eos=True, **kinds[index % 4])
        for index in range(12)
    ]
    run.run(prompts, params)
    close = partial(torch.testing.assert_close, rtol=2e-3, atol=2e-4)
    num_scored = 0
    for seen in run.seen:
        length = len(seen.drafted)
        assert set(seen.drafted) <= set(SHARED["draft"].values())
        close(seen.q[:length], expected_probs(models, "draft", seen))
        if seen.c is not None:
            num_scored += length
            close(seen.c[:length], expected_probs(models, "companion", seen))
    assert num_scored > 50
    written = {
        token for seen in run.seen for token in seen.tokens[seen.request.num_prompt_tokens :]
    }
    assert written >= {2, 5, 7}, "all tokens of the output are shared"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "companion"),
    [
        ("fixed", None),
        ("staged", COMPANION),
        pytest.param("svip", None, marks=pytest.mark.exhaustive),
        pytest.param("staged", TARGET, marks=pytest.mark.exhaustive),
        pytest.param("tetris", None, marks=pytest.mark.exhaustive),
    ],
    ids=["fixed", "staged-mapped", "svip", "staged-of-the-target", "tetris"],
)
def test_sampled_texts_follow_the_target(models, policy, companion):
    llm = build(models, companion=companion, policy=policy, max_batch_size=256)
    num_tokens, prompt = 3, [2, 5, 1]
    for setting in (PLAIN, HOT, PENALISED):
        requests = [
            llm.engine.add(
                None, prompt, replace(setting, max_tokens=num_tokens + seed % 3, seed=seed)
            )
            for seed in range(5000)
        ]
        while llm.engine.num_unfinished:
            llm.engine.step()
        said = [request.output().token_ids[:num_tokens] for request in requests]
        expected = exact_distribution(models.reference(TARGET), prompt, setting, num_tokens)
        counts = sequence_counts(torch.tensor(said), TARGET.vocab)
        assert chi_square_p_value(counts, expected.joint()) > NOT_UNLIKELY
        assert sum(request.stats.num_accepted for request in requests) > 0


def test_the_share_of_the_intersection_is_said_in_one_line(models):
    speculation = unguarded(models.folder(DRAFT), policy="fixed")
    with pytest.warns(VocabularyWarning) as caught:
        LLM(models.folder(TARGET), speculation, dtype="float32")
    (line,) = [str(each.message) for each in caught if each.category is VocabularyWarning]
    assert "5 of its 7 tokens are shared; they hold " in line
    assert "\n" not in line


def test_a_vocabulary_without_intersection_is_refused(models):
    with pytest.raises(VocabularyMismatchError, match="have no token in common") as caught:
        build(models, STRANGER)
    assert caught.value.field == "draft"
    assert "\n" not in str(caught.value)


def test_replicas_need_the_targets_vocabulary(models):
    with pytest.raises(InvalidParameterError, match="target's vocabulary") as caught:
        build(models, draft_replicas=2)
    assert caught.value.field == "draft_replicas"
