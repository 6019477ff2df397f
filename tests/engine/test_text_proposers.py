"""Proposers that draft from the request's own text: lossless, and the same text for a seed."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from draftwise import LLM, SamplingParams
from draftwise.core.rejection import accept
from draftwise.engine import acceptance
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.proposers import create_proposer
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.request import Request
from draftwise.errors import InvalidParameterError
from draftwise.models.loading import load_model
from draftwise.policies import POLICIES
from draftwise.speculation import RequestSpeculation

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..levels import exhaustive_unless
from ..stand_ins import fixed_latency, unguarded
from ..tiny_models import Recipe
from .assembly import generate, token_ids, varied_work
from .exact import exact_distribution
from .test_proposers import LOSSLESS, NOT_UNLIKELY, RECIPE, VARIED, build

NAMES = ["suffix", "ngram"]
# The last three tokens occur earlier, and the target continues them like the last time in half of
# all cases.
PROMPT = [4, 3, 1, 5, 7, 4, 3, 1, 7, 6, 4, 3, 1]
CONTROLS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.5, "top_p": 0.9},
    "filtered": {"top_k": 4, "min_p": 0.05},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
}


def p_value(
    models, engine, controls, count, prompt=PROMPT, recipe=RECIPE, least_accepted=0.05, max_tokens=3
):
    """Of the first tokens of texts of one prompt, if they follow the target's distribution."""
    params = SamplingParams(max_tokens=3, **controls)
    each = [SamplingParams(max_tokens=max_tokens, seed=seed, **controls) for seed in range(count)]
    outputs = generate(engine, [prompt] * count, each)
    accepted = sum(output.speculation.num_accepted for output in outputs)
    assert accepted > least_accepted * count
    expected = exact_distribution(models.reference(recipe), prompt, params, 3)
    beginnings = [tokens[:3] for tokens in token_ids(outputs)]
    counts = sequence_counts(torch.tensor(beginnings), recipe.vocab)
    return chi_square_p_value(counts, expected.joint())


@pytest.mark.covering("name", "policy")
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", exhaustive_unless(lambda name: name in ("fixed", "adaptive", "svip"), LOSSLESS)
)
@pytest.mark.parametrize("name", NAMES)
def test_texts_follow_the_target_with_every_policy(models, name, policy):
    scores = POLICIES[policy].scores_offers
    engine = build(models, RECIPE, policy, 64, draft=name, companion=scores)
    assert p_value(models, engine, {}, 6000) > NOT_UNLIKELY


@pytest.mark.covering("name", "controls", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 16])
@pytest.mark.parametrize("controls", CONTROLS)
@pytest.mark.parametrize("name", NAMES)
def test_texts_follow_the_target_with_every_control(models, name, controls, max_batch_size):
    engine = build(models, RECIPE, "fixed", max_batch_size, draft=name)
    assert p_value(models, engine, CONTROLS[controls], 2000) > NOT_UNLIKELY


@pytest.mark.slow
def test_a_biased_law_is_noticed(models, monkeypatch):
    """The proposed token is accepted too often, as a comparison after the draw would do."""

    def biased(*arguments, **options):
        law = list(arguments)
        law[6] = torch.full_like(law[5], 0.6)
        return accept(*law, **options)

    monkeypatch.setattr(acceptance, "accept", biased)
    monkeypatch.setattr(acceptance, "library_for", lambda device: None)
    engine = build(models, RECIPE, "fixed", 64, draft="suffix")
    assert p_value(models, engine, {}, 6000) < 1e-6


@pytest.mark.parametrize(("name", "policy"), [("suffix", "adaptive"), ("ngram", "fixed")])
def test_a_seed_gives_the_same_text_with_and_without_drafts(models, name, policy):
    """Sampled, greedy and penalised, at any batch size and draft length."""
    prompts, params = varied_work(30)
    prompts = [[*prompt, *prompt] for prompt in prompts]
    expected = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
    for max_batch_size in (1, 16):
        engine = build(models, VARIED, policy, max_batch_size, draft=name)
        outputs = generate(engine, prompts, params)
        assert token_ids(outputs) == token_ids(expected)
        assert sum(output.speculation.num_accepted for output in outputs) > 0
        engine.change_speculation(num_speculative_tokens=7)
        assert token_ids(generate(engine, prompts, params)) == token_ids(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_the_targets_on_100_prompts(models, name):
    recipe = Recipe(vocab=32, seed=9, context=96)
    prompts = [[(7 * i + j * j * (1 + i % 3)) % 11 for j in range(2 + i % 40)] for i in range(100)]
    params = [SamplingParams(max_tokens=40, temperature=0)] * len(prompts)
    expected = generate(build(models, recipe, "none", 8, draft="none"), prompts, params)
    outputs = generate(build(models, recipe, "fixed", 16, draft=name), prompts, params)
    assert token_ids(outputs) == token_ids(expected)
    accepted = sum(output.speculation.num_accepted for output in outputs)
    assert accepted > 0.1 * sum(output.speculation.num_tokens for output in outputs)


def test_suffix_is_the_draft_if_none_is_named(models):
    folder = models.folder(VARIED)
    prompts = [[*prompt, *prompt] for prompt in varied_work(10)[0]]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = LLM(folder, dtype="float32").generate(prompts, params)
    for speculation in ({"policy": "fixed"}, unguarded(policy="fixed")):
        outputs = LLM(folder, speculation, "float32").generate(prompts, params)
        assert token_ids(outputs) == token_ids(expected)
        assert sum(output.speculation.num_accepted for output in outputs) > 0


def test_ngram_continues_the_latest_occurrence_of_the_longest_match():
    context = ProposerContext(100, torch.device("cpu"), 4, 64)
    proposer = create_proposer("ngram", context)

    def continuation(tokens, max_tokens=3):
        params, speculation = SamplingParams(), RequestSpeculation()
        request = Request(0, None, tokens, params, None, frozenset(), 64, speculation)
        return list(proposer.continuation(request, max_tokens))

    assert continuation([1, 2, 3, 7, 8, 2, 3, 9, 1, 2, 3]) == [7, 8, 2]
    assert continuation([4, 2, 3, 7, 2, 3, 9, 5, 3]) == [9, 5, 3]
    assert continuation([1, 2, 3]) == []
    assert continuation([1]) == []
    assert continuation([6, 6], 2) == [6]


class TestCorpus:
    """Texts beside the requests' own, from the configuration or from earlier outputs."""

    def engine(self, models, draft="suffix", policy="fixed", **settings):
        target = load_model(
            models.folder(VARIED), "target", torch.float32, torch.device("cpu"), None
        )
        return Engine(
            Models(replace(target, tokenizer=numbers())),
            unguarded(draft, policy=policy, num_speculative_tokens=4, **settings),
            EngineOptions(8),
            fixed_latency() if policy == "adaptive" else None,
        )

    def documents(self, models, path):
        """What the target answers, as a file of text."""
        prompts = [[n, n + 1, n + 2] for n in range(8)]
        params = [SamplingParams(max_tokens=20, temperature=0)] * len(prompts)
        answers = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
        lines = [json.dumps({"text": " ".join(map(str, output.token_ids))}) for output in answers]
        path.write_text("\n".join(lines))
        return prompts, params, token_ids(answers)

    def accepted(self, outputs):
        return sum(output.speculation.num_accepted for output in outputs)

    def test_documents_are_continued(self, models, tmp_path):
        prompts, params, expected = self.documents(models, tmp_path / "documents.jsonl")
        without = generate(self.engine(models), prompts, params)
        for policy in ("fixed", "adaptive"):
            engine = self.engine(models, policy=policy, corpus=tmp_path / "documents.jsonl")
            outputs = generate(engine, prompts, params)
            assert token_ids(outputs) == token_ids(without) == expected
            assert self.accepted(outputs) > self.accepted(without)

    def test_outputs_are_remembered_for_their_own_salt(self, models):
        params = SamplingParams(max_tokens=20, temperature=0, cache_salt="alice")
        engine = self.engine(models, remember_outputs=True)
        first, again = (generate(engine, [[1, 2, 3]], [params]) for _ in range(2))
        other = generate(engine, [[1, 2, 3]], [replace(params, cache_salt="bob")])
        assert token_ids(first) == token_ids(again) == token_ids(other)
        assert self.accepted(again) > self.accepted(first) == self.accepted(other)
        assert engine.corpus.num_tokens > 0

    @pytest.mark.slow
    def test_texts_follow_the_target_with_a_shared_corpus(self, models):
        engine = self.small(models, remember_outputs=True)
        assert p_value(models, engine, {}, 6000) > NOT_UNLIKELY
        assert engine.corpus.num_tokens > 1000

    def small(self, models, **settings):
        target = load_model(
            models.folder(RECIPE), "target", torch.float32, torch.device("cpu"), None
        )
        speculation = unguarded("suffix", policy="fixed", num_speculative_tokens=3)
        return Engine(Models(target), replace(speculation, **settings), EngineOptions(16))

    def test_a_seed_gives_the_same_text_with_a_corpus(self, models):
        prompts, params = varied_work(30)
        expected = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
        engine = self.engine(models, remember_outputs=True)
        for _ in range(3):
            assert token_ids(generate(engine, prompts, params)) == token_ids(expected)

    def test_unusable_settings_are_refused(self, models, tmp_path):
        (tmp_path / "bad.jsonl").write_text('{"text": "1 2"}\n{')
        (tmp_path / "surrogate.jsonl").write_text('"1 2"\n["1", "\\ud800"]')
        (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
        for settings, field, words in (
            ({"corpus": tmp_path / "bad.jsonl"}, "corpus", "line 2, is not JSON"),
            ({"corpus": tmp_path / "surrogate.jsonl"}, "corpus", "line 2, has an unpaired"),
            ({"corpus": tmp_path / "bytes"}, "corpus", "cannot be read"),
            ({"corpus": tmp_path / "missing"}, "corpus", "cannot be read"),
            ({"corpus": tmp_path / "bytes", "draft": "ngram"}, "corpus", "needs the draft"),
            ({"remember_outputs": True, "draft": "ngram"}, "remember_outputs", "needs the draft"),
        ):
            with pytest.raises(InvalidParameterError, match=words) as caught:
                self.engine(models, **settings)
            assert caught.value.field == field


def numbers():
    """A tokenizer of texts that consist of token ids."""
    vocabulary = {str(number): number for number in range(VARIED.vocab)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
