"""The signals of every drafted position equal those of fresh forward passes of the models."""

import functools
from types import SimpleNamespace

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.engine.cached_model import CachedModel, ForwardInput
from draftwise.errors import (
    InvalidParameterError,
    VocabularyMismatchError,
)
from draftwise.models.loading import load_model
from draftwise.policies import catalogue as registry

from ..stand_ins import unguarded
from ..tiny_models import Recipe, byte_tokenizer
from .recording import RecordedEngine, Recorder, expected_beliefs
from .test_failures import break_token

pytestmark = pytest.mark.slow

VOCAB = 32
TARGET = Recipe(vocab=VOCAB, seed=8, tokenizer=True)
DRAFT = TARGET.draft()
COMPANION = TARGET.draft(0.2, noise_seed=2)

GREEDY = {"temperature": 0.0}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
SAMPLED = [
    {},
    {"temperature": 0.6, "top_k": 7},
    {"temperature": 1.4, "top_p": 0.85, "min_p": 0.03},
    {**PENALTIES, "top_p": 0.9, "logit_bias": {1: 1.0, 3: -0.7}},
]
MIXED = [GREEDY, *SAMPLED, {**GREEDY, **PENALTIES}, {**GREEDY, "top_k": 5, "logit_bias": {2: 2.0}}]


@functools.cache
def loaded(folder):
    return load_model(folder, "model", torch.float32, torch.device("cpu"), None)


def build(models, target=TARGET, draft=DRAFT, companion=COMPANION, **settings):
    settings.setdefault("options", {"max_batch_size": 5, "max_chunk_tokens": 9})
    small = [loaded(models.folder(recipe)) for recipe in (target, draft, companion)]
    return RecordedEngine(*small, **settings)


def work(kinds, count=14, longest=25, vocab=VOCAB):
    """Requests of all kinds in turn, with prompts and texts of many lengths."""
    prompts = [
        [(index * 5 + i * 3) % vocab for i in range(1 + index * 4 % 17)] for index in range(count)
    ]
    params = [
        SamplingParams(max_tokens=1 + index * 7 % longest, seed=index, **kinds[index % len(kinds)])
        for index in range(count)
    ]
    return prompts, params


def assert_signals(models, run, draft=DRAFT, companion=COMPANION, target=TARGET):
    """Compare all recorded signals. Returns the number of positions that the companion scored."""
    close = functools.partial(torch.testing.assert_close, rtol=2e-3, atol=2e-4)
    scored = 0
    for seen in run.seen:
        length = len(seen.drafted)
        index = torch.arange(length), torch.tensor(seen.drafted, dtype=torch.long)
        q = expected_beliefs(models.reference(draft), seen, target.vocab)
        close(seen.q[:length], q)
        close(seen.entropy[:length], -torch.special.xlogy(q, q).sum(1))
        close(seen.q_drawn[:length], q[index])
        assert (seen.q_drawn[:length] > 0).all()
        for signal in (seen.q, seen.entropy, seen.q_drawn):
            assert not signal[length:].any()
        if seen.c is None:
            continue
        c = expected_beliefs(models.reference(companion), seen, target.vocab)
        # Beyond its context the companion gives no scores.
        c[max(0, companion.context + 1 - len(seen.tokens)) :] = 0.0
        scored += int(c.any(1).sum())
        close(seen.c[:length], c)
        close(seen.overlap[:length], torch.minimum(q, c).sum(1))
        close(seen.agreement[:length], (c[index] / q[index]).clamp(max=1.0), rtol=1e-2, atol=1e-3)
        for signal in (seen.c, seen.overlap, seen.agreement):
            assert not signal[length:].any()
    return scored


def assert_greedy_texts(models, outputs, prompts, params, target=TARGET):
    """Greedy requests give the same output as the target alone."""
    plain = LLM(models.folder(target), dtype="float32").generate(prompts, params)
    for ours, theirs, each in zip(outputs, plain, params, strict=True):
        assert ours.error is None
        if each.temperature == 0:
            assert ours.token_ids == theirs.token_ids


@pytest.mark.parametrize("max_chunk_tokens", [512, 9])
def test_signals_of_ragged_drafts(models, max_chunk_tokens):
    """Requests join and leave, prompts come in chunks, drafts are rejected and rolled back."""
    options = {"max_batch_size": 5, "max_chunk_tokens": max_chunk_tokens}
    run = build(models, options=options)
    prompts, params = work(MIXED)
    outputs = run.run(prompts, params)
    assert assert_signals(models, run) == sum(len(seen.drafted) for seen in run.seen) > 100
    assert {len(seen.drafted) for seen in run.seen} == set(range(5))
    stats = [output.speculation for output in outputs]
    assert 0 < sum(s.num_accepted for s in stats) < sum(s.num_verified for s in stats)
    assert sum(s.num_verified for s in stats) < sum(s.num_drafted for s in stats)
    assert_greedy_texts(models, outputs, prompts, params)


@pytest.mark.parametrize("asks", [lambda n: n % 3 == 0, lambda n: n > 12, lambda n: n % 11 < 3])
def test_a_companion_that_skips_steps(models, asks):
    """When the companion scores again, it first reads the tokens that it missed."""
    run = build(models, asks=asks)
    prompts, params = work(MIXED)
    outputs = run.run(prompts, params)
    scored = assert_signals(models, run)
    assert 30 < scored < sum(len(seen.drafted) for seen in run.seen)
    assert {seen.c is None for seen in run.seen} == {True, False}
    assert_greedy_texts(models, outputs, prompts, params)


@pytest.mark.parametrize("longest_verified", [0, 1])
def test_signals_after_most_of_the_draft_is_dropped(models, longest_verified):
    """Draft and companion have read more tokens than remain."""
    run = build(models, longest_verified=longest_verified)
    prompts, params = work(MIXED)
    outputs = run.run(prompts, params)
    assert assert_signals(models, run) > 150
    assert_greedy_texts(models, outputs, prompts, params)


@pytest.mark.parametrize("contexts", [(64, 20), (20, 64), (64, 1)])
def test_signals_with_shorter_contexts(models, contexts):
    """Drafts end at the draft's context. Scores beyond the companion's context are 0."""
    draft = TARGET.draft(context=contexts[0])
    companion = TARGET.draft(0.2, noise_seed=2, context=contexts[1])
    run = build(models, draft=draft, companion=companion)
    prompts, params = work(MIXED, 10, longest=40)
    outputs = run.run(prompts, params)
    scored = assert_signals(models, run, draft, companion)
    num_drafted = sum(len(seen.drafted) for seen in run.seen)
    assert scored == num_drafted if contexts[1] == 64 else scored < num_drafted
    assert max(len(seen.tokens) + len(seen.drafted) for seen in run.seen) > min(contexts)
    assert_greedy_texts(models, outputs, prompts, params)


@pytest.mark.parametrize(("draft_vocab", "companion_vocab"), [(24, 40), (40, 24), (24, 24)])
def test_signals_with_other_logit_widths(models, draft_vocab, companion_vocab):
    """Logits are truncated or padded to the target's width before they become probabilities."""
    draft = Recipe(vocab=draft_vocab, seed=8)
    companion = Recipe(vocab=companion_vocab, seed=9)
    run = build(models, draft=draft, companion=companion)
    prompts, params = work(MIXED)
    outputs = run.run(prompts, params)
    assert assert_signals(models, run, draft, companion) > 150
    assert_greedy_texts(models, outputs, prompts, params)
    if companion_vocab < VOCAB:
        assert not any(seen.c[:, companion_vocab:].any() for seen in run.seen)


def test_signals_while_drafting_equal_those_at_the_end(models):
    """A policy sees the same signals after each token as at the end of the draft."""
    run = build(models)
    prompts, params = work(MIXED)
    for index, prompt in enumerate(prompts[:5]):
        run.engine.add(None, prompt, params[index])
    count = 0
    while run.engine.num_unfinished:
        run.step()
        draft, _ = run.recorder.seen
        for at, position in enumerate(run.recorder.positions):
            rows = list(position.requests)
            assert position.index == at
            assert torch.equal(position.tokens, draft.tokens[rows, at])
            assert torch.equal(position.draft_probs, draft.signals.draft_probs[rows, at])
            assert torch.equal(position.entropy, draft.signals.entropy[rows, at])
            assert torch.equal(position.token_probs, draft.signals.token_probs[rows, at])
            count += len(rows)
    assert count == sum(len(seen.drafted) for seen in run.seen) > 0


class TestNanCompanion:
    """Missing scores are 0, never NaN, and the outputs do not change."""

    BROKEN = 17

    def run(self, models, prompts, params):
        run = build(models)
        folder = models.folder(COMPANION)
        own = load_model(folder, "companion", torch.float32, torch.device("cpu"))
        break_token(own.model, self.BROKEN)
        run.engine._pipeline.companion._cached_model.model = own.model
        return run, run.run(prompts, params)

    def test_texts_are_unchanged_and_signals_are_finite(self, models):
        prompts, params = work(MIXED)
        assert sum(self.BROKEN in prompt for prompt in prompts) > 2
        expected = build(models).run(prompts, params)
        run, outputs = self.run(models, prompts, params)
        # The lengths are drawn independently of the companion.
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert_greedy_texts(models, outputs, prompts, params)
        spoilt = 0
        for seen in run.seen:
            for signal in (seen.overlap, seen.agreement, seen.c):
                assert signal.isfinite().all()
            if self.BROKEN in seen.tokens:
                assert not seen.overlap.any()
                assert not seen.agreement.any()
                assert not seen.c.any()
                spoilt += len(seen.drafted)
        assert 0 < spoilt < sum(len(seen.drafted) for seen in run.seen)

    def test_other_requests_keep_their_scores(self, models):
        """Other requests, and later requests in the same slot, are scored as before."""
        prompts, _ = work([{}])
        params = [
            SamplingParams(max_tokens=12, seed=seed, logit_bias={self.BROKEN: -100.0})
            for seed in range(len(prompts))
        ]
        run, _ = self.run(models, prompts, params)
        healthy = [seen for seen in run.seen if self.BROKEN not in seen.tokens]
        assert 0 < len(healthy) < len(run.seen)
        run.seen = healthy
        assert_signals(models, run)

    def test_a_nan_draft_model_drafts_nothing(self, models):
        run = build(models)
        own = load_model(models.folder(DRAFT), "draft", torch.float32, torch.device("cpu"))
        break_token(own.model, self.BROKEN)
        run.engine._pipeline.proposer.cached_model.model = own.model
        prompts, params = work(MIXED)
        outputs = run.run(prompts, params)
        assert_greedy_texts(models, outputs, prompts, params)
        assert any(seen.drafted for seen in run.seen)
        for seen in run.seen:
            for signal in (seen.entropy, seen.q_drawn, seen.q):
                assert signal.isfinite().all()
            if seen.overlap is not None:
                assert (seen.overlap + seen.agreement).isfinite().all()
            if self.BROKEN in seen.tokens:
                assert not seen.drafted


@pytest.fixture
def register(monkeypatch):
    """Register the recorder under its name."""
    monkeypatch.setattr(registry, "POLICIES", {**registry.POLICIES, "recorder": Recorder})


def open_llm(models, companion, policy="recorder", **options):
    config = unguarded(
        models.folder(DRAFT), companion=companion, policy=policy, num_speculative_tokens=3
    )
    return LLM(models.folder(TARGET), config, dtype="float32", **options)


@pytest.mark.usefixtures("register")
class TestLoading:
    def test_a_separate_model(self, models):
        llm = open_llm(models, models.folder(COMPANION))
        assert llm.companion.name == models.folder(COMPANION)
        (output,) = llm.generate([1, 2], SamplingParams(max_tokens=10, temperature=0))
        plain = llm.with_speculation(None)
        (expected,) = plain.generate([1, 2], SamplingParams(max_tokens=10, temperature=0))
        assert plain.companion is None
        assert output.token_ids == expected.token_ids

    def test_the_quantised_draft(self, models):
        llm = open_llm(models, "draft:int4")
        assert llm.companion.name == f"{models.folder(DRAFT)}:int4"
        assert llm.draft.name == models.folder(DRAFT)
        assert llm.companion.fingerprint != llm.draft.fingerprint
        assert llm.companion.num_parameters == llm.draft.num_parameters
        assert llm.generate([1, 2], SamplingParams(seed=1))[0].error is None
        _, companion_scores = llm.engine.policies.default.seen
        assert companion_scores is None or companion_scores.overlap.mean() > 0.5

    def test_loaded_models_are_shared(self, models):
        llm = open_llm(models, "draft:int8")
        again = llm.with_speculation(llm.speculation)
        assert again.draft is llm.draft
        assert again.companion is llm.companion
        other = llm.with_speculation(
            unguarded(models.folder(DRAFT), companion="draft:int4", policy="recorder")
        )
        assert other.draft is llm.draft
        assert other.companion.name.endswith(":int4")
        # The same draft model as a companion.
        swapped = llm.with_speculation(
            unguarded(models.folder(COMPANION), companion=models.folder(DRAFT), policy="recorder")
        )
        assert swapped.companion is llm.draft

    def test_added_tokens_do_not_make_another_vocabulary(self, models, tmp_path):
        COMPANION.build().save_pretrained(tmp_path)
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["zz"])
        tokenizer.save_pretrained(tmp_path)
        llm = open_llm(models, str(tmp_path))
        assert llm.companion.translator is None

    def test_a_companion_without_shared_tokens_is_refused(self, models):
        stranger = Recipe(vocab=3, pieces=("x", "y", "z"))
        with pytest.raises(VocabularyMismatchError) as caught:
            open_llm(models, models.folder(stranger))
        assert caught.value.field == "companion"

    def test_a_quantised_draft_with_another_vocabulary_is_refused(self, models):
        config = unguarded(
            models.folder(Recipe(vocab=8)), companion="draft:int8", policy="recorder"
        )
        with pytest.raises(VocabularyMismatchError):
            LLM(models.folder(Recipe(vocab=16)), config, dtype="float32")

    @pytest.mark.parametrize(
        ("companion", "policy"), [("draft:int8", "none"), ("zoo:companion", "fixed")]
    )
    def test_a_companion_that_the_policy_does_not_use_is_refused(self, models, companion, policy):
        with pytest.raises(InvalidParameterError, match="leave it out or choose") as caught:
            open_llm(models, companion, policy)
        assert caught.value.field == "companion"
        assert repr(policy) in caught.value.message

    def test_a_missing_companion_is_refused(self, models, monkeypatch):
        monkeypatch.setattr(Recorder, "needs_companion", True)
        with pytest.raises(InvalidParameterError, match="needs a companion") as caught:
            open_llm(models, None)
        assert caught.value.field == "companion"


@pytest.mark.parametrize("parents", [None, (-1, -1, 0, 0)])
def test_the_newest_token_is_read_with_the_draft(models, parents):
    """Also if the tokens that a companion with a sliding window missed fill a whole pass."""
    recipe = Recipe(family="gemma3_text", vocab=VOCAB, seed=8, context=256)
    model = loaded(models.folder(recipe)).model
    text, drafted = [(7 * i + i * i) % 31 for i in range(160)], [5, 9, 2, 4]

    def logits(first, count):
        cached = CachedModel(model, model.new_cache(1, 256, 64), VOCAB)
        request = SimpleNamespace(tokens=text[:count], cache_slot=0)
        cached.admit(request)
        if first:
            cached.read([ForwardInput(request, first)])
        return cached.read([ForwardInput(request, count, drafted, 5, parents)])[0]

    for count in (*range(56, 68), *range(120, 132)):
        assert logits(0, count).shape == (5, VOCAB)
        torch.testing.assert_close(logits(0, count), logits(count - 7, count), rtol=0, atol=1e-4)
