"""What a head has read stays consistent with its requests: prefixes, lags, interrupts, mixtures."""

import pytest

from draftwise import LLM, SamplingParams, StructuredOutputs
from draftwise.engine import cached_draft_head
from draftwise.engine.cached_head import CachedHead
from draftwise.errors import EngineError, InvalidParameterError, UnsupportedModelError
from draftwise.models.heads.model import HeadModel
from draftwise.outputs import TokenSource
from draftwise.policies.base import PolicyContext

from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_models import Recipe
from . import eagle_heads, test_heads
from .assembly import assert_same_with_cancellations, generate, token_ids, varied_work
from .heads import HEAD, TARGET, engine_with_head, head_folder, recorded_drafts
from .recording import Recorder

EAGLE = eagle_heads.HEAD
WINDOWED = HEAD.changed(layer={"layer_types": ["sliding_attention"], "sliding_window": 24})
both_kinds = pytest.mark.parametrize("head", [HEAD, EAGLE], ids=["eagle-3", "eagle-1"])
LONG = TARGET.draft(0.0, context=256)
PREFIX = [(5 * i * i + i) % 12 for i in range(100)]


def params(count, **changes):
    return [SamplingParams(**{"max_tokens": 20, "seed": at, **changes}) for at in range(count)]


def assert_published(models, drafts, head, target=TARGET):
    """Compare drafts with the published pass of their kind of head."""
    kind = eagle_heads if head == EAGLE else test_heads
    kind.assert_published(models, drafts, head, target)


@pytest.mark.parametrize("head", [HEAD, WINDOWED, EAGLE], ids=["eagle-3", "windowed", "eagle-1"])
def test_prefixes_are_restored_with_what_the_head_read(models, head):
    engine = engine_with_head(models, LONG, head, num_speculative_tokens=5, max_chunk_tokens=32)
    drafts = recorded_drafts(engine)
    prompts = [PREFIX[: 30 + 10 * at] for at in range(6)]
    first = generate(engine, prompts, params(6))
    turns = [[*output.prompt_token_ids, *output.token_ids, 7, 8] for output in first]
    second = generate(engine, turns, params(6))
    again = generate(engine, prompts, params(6))
    assert token_ids(again) == token_ids(first)
    assert all(each.num_cached_tokens >= 16 for each in [*again, *second])
    # What was accepted in the last step of a request is not read any more.
    assert any(each.num_cached_tokens >= 80 for each in second)
    assert_published(models, drafts, head, LONG)


def test_a_prefix_ends_before_an_entry_that_depends_on_another_token(models):
    """The head's entry of a position depends on the next token, too."""
    engine = engine_with_head(models, LONG, num_speculative_tokens=5)
    drafts = recorded_drafts(engine)
    generate(engine, [PREFIX[:60]], params(1))
    same, other = [*PREFIX[:33], 5], [*PREFIX[:32], (PREFIX[32] + 1) % 12, 5, 6]
    outputs = [generate(engine, [prompt], params(1))[0] for prompt in (same, other)]
    assert [output.num_cached_tokens for output in outputs] == [32, 16]
    assert_published(models, drafts, HEAD, LONG)


@both_kinds
def test_a_head_that_skips_steps_catches_up(models, head, monkeypatch):
    """A policy that drafts nothing in most steps: waiting states are bounded and read in time."""
    monkeypatch.setattr(cached_draft_head, "_MAX_PENDING", 4)
    waiting = []
    commit = CachedHead.commit

    def checked(self, changes):
        commit(self, changes)
        for request in changes.requests:
            slot = request.cache_slot
            waiting.append(self._pending[slot].end - self.cache.lengths[slot])

    monkeypatch.setattr(CachedHead, "commit", checked)
    engine = engine_with_head(
        models,
        head=head,
        policy_object=Recorder(PolicyContext(5)),
        num_speculative_tokens=5,
        max_batch_size=4,
        caches_prefixes=False,
    )
    drafts = recorded_drafts(engine)
    prompts = [[at, 3, 5] for at in range(8)]
    generate(engine, prompts, params(8, max_tokens=30))
    assert max(waiting) > 1
    assert max(waiting) <= 4 + 6
    assert_published(models, drafts, head)


def interrupted(engine, requests, error, reads, monkeypatch):
    """Steps until all requests end, with an error in some of the head's passes."""
    read, count = HeadModel.read, [0]

    def failing(self, *arguments, **named):
        count[0] += 1
        if count[0] in reads:
            raise error
        return read(self, *arguments, **named)

    monkeypatch.setattr(HeadModel, "read", failing)
    raised = 0
    while engine.num_unfinished:
        try:
            engine.step()
        except type(error):
            raised += 1
    monkeypatch.setattr(HeadModel, "read", read)
    assert raised
    return [request.output() for request in requests]


@both_kinds
@pytest.mark.usefixtures("operations")
def test_interrupted_steps_are_repeated(models, head, monkeypatch):
    settings = {"num_speculative_tokens": 5, "max_chunk_tokens": 8, "caches_prefixes": False}
    settings["head"] = head
    prompts = [[at, 3, 5, 7, 1, 2, 4, 6, 8, 1, 3] for at in range(5)]
    expected = token_ids(generate(engine_with_head(models, **settings), prompts, params(5)))
    engine = engine_with_head(models, **settings)
    drafts = recorded_drafts(engine)
    requests = [
        engine.add(None, prompt, each) for prompt, each in zip(prompts, params(5), strict=True)
    ]
    reads = {1, 2, 5, 9, 10, 14, 20}
    outputs = interrupted(engine, requests, KeyboardInterrupt(), reads, monkeypatch)
    assert token_ids(outputs) == expected
    assert_published(models, drafts, head)


@pytest.mark.parametrize("interrupted_commit", [1, 3])
def test_states_that_an_interrupt_lost_end_the_drafts_of_their_request(
    models, interrupted_commit, monkeypatch
):
    """The texts stay those of the target, and other requests are drafted for."""
    prompts = [[at, 3, 5] for at in range(4)]
    expected = token_ids(generate(engine_with_head(models), prompts, params(4, temperature=0.0)))
    engine = engine_with_head(models)
    requests = [engine.add(None, prompt, params(1, temperature=0.0)[0]) for prompt in prompts]
    commit, count = CachedHead.commit, [0]

    def failing(self, changes):
        count[0] += 1
        if count[0] == interrupted_commit:
            raise KeyboardInterrupt
        commit(self, changes)

    monkeypatch.setattr(CachedHead, "commit", failing)
    for _ in range(interrupted_commit - 1):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.num_unfinished:
        engine.step()
    assert token_ids([request.output() for request in requests]) == expected
    drafts = recorded_drafts(engine)
    generate(engine, prompts, params(4))
    assert_published(models, drafts, HEAD)


@pytest.mark.usefixtures("operations")
def test_a_failed_step_leaves_the_engine_usable(models, monkeypatch):
    engine = engine_with_head(models, num_speculative_tokens=5)
    requests = [engine.add(None, [1, 2, 3], each) for each in params(3)]
    outputs = interrupted(engine, requests, RuntimeError("broken"), {3}, monkeypatch)
    assert all(isinstance(output.error, EngineError) for output in outputs)
    drafts = recorded_drafts(engine)
    generate(engine, [[1, 2, 3], [4, 5]], params(2))
    assert_published(models, drafts, HEAD)


@both_kinds
@pytest.mark.parametrize("overlaps", [False, True])
def test_requests_that_join_and_leave(models, overlaps, head):
    target, head = TARGET.draft(0.0, vocab=16), head.changed(vocab=16)
    prompts, work = varied_work(30)
    plain = engine_with_head(models, target, head, policy="none", max_batch_size=8)
    greedy = [SamplingParams(max_tokens=each.max_tokens, temperature=0.0) for each in work]
    engine = engine_with_head(models, target, head, overlaps=overlaps, max_batch_size=8)
    assert token_ids(generate(engine, prompts, greedy)) == token_ids(
        generate(plain, prompts, greedy)
    )
    assert_same_with_cancellations(engine, token_ids(generate(engine, prompts, work)))


@both_kinds
def test_with_known_continuations(models, head):
    """The hybrid of copied text and a head."""
    prompts = [[*([1, 2, 3, 4, 5] * 4), at] for at in range(6)]
    greedy = params(6, temperature=0.0, max_tokens=40)
    expected = token_ids(generate(engine_with_head(models, head=head), prompts, greedy))
    engine = engine_with_head(models, head=head, drafts=("suffix",))
    outputs = generate(engine, prompts, greedy)
    assert token_ids(outputs) == expected
    sources = {source for output in outputs for source in output.token_sources}
    assert {TokenSource.COPY, TokenSource.DRAFT} <= sources


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "gpt2"])
def test_greedy_texts_with_other_targets(models, family):
    """Targets of Draftwise's own passes and of Hugging Face's modules."""
    target = Recipe(family, vocab=12, seed=2, config={"num_hidden_layers": 3})
    if family == "gemma3_text":
        target = Recipe(family, vocab=12, seed=2)
    head = HEAD.changed(layers=(0, 1, 3))
    greedy = params(4, temperature=0.0)
    prompts = [[1], [2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 0]]
    plain = generate(engine_with_head(models, target, head, policy="none"), prompts, greedy)
    outputs = generate(engine_with_head(models, target, head), prompts, greedy)
    assert token_ids(outputs) == token_ids(plain)
    assert sum(output.speculation.num_verified for output in outputs)


def test_a_grammar_restricts_drafts(models):
    target = Recipe(vocab=40, seed=3, tokenizer=True, config={"eos_token_id": 1})
    head = HEAD.changed(vocab=40, draft_vocab=40)
    llm = LLM(
        models.folder(target),
        unguarded(draft=head_folder(models, head), policy="fixed"),
        dtype="float32",
    )
    limits = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(regex="[ab]{8}"))
    outputs = llm.generate([[3, 4, 5], [6, 7]], limits)
    assert all(set(output.text) <= set("ab") for output in outputs)
    assert all(len(output.text) == 8 for output in outputs)


def test_heads_of_other_targets_are_refused(models):
    for target, message in [
        (TARGET.draft(0.0, vocab=16), "a vocabulary of 12, and the target has 16"),
        (TARGET.draft(0.0, config={"num_hidden_layers": 1}), "the target has 1 layers"),
        (
            TARGET.draft(0.0, config={"num_hidden_layers": 2, "hidden_size": 32}),
            "a hidden size of 16, and the target has 32",
        ),
    ]:
        caught = error_of(
            engine_with_head, models, target, error=UnsupportedModelError, match=message
        )
        assert caught.field == "draft", target


def test_a_head_of_another_width_needs_an_embedding(models):
    with pytest.raises(UnsupportedModelError, match=r"has no embed_tokens.weight"):
        engine_with_head(models, head=HEAD.changed(hidden=24))


def test_what_heads_cannot_do_is_refused(models):
    for settings, options, message in [
        ({"draft": "HEAD:int8"}, {}, "is a head, which is not quantised"),
        ({"draft": "HEAD"}, {"draft_replicas": 2}, "needs a draft model"),
        ({"draft": "HEAD", "companion": "HEAD", "policy": "sv"}, {}, "is a head"),
        ({"draft": "HEAD", "companion": "draft:int8", "policy": "sv"}, {}, "is a head"),
    ]:
        folder = head_folder(models, HEAD)
        settings = {name: value.replace("HEAD", folder) for name, value in settings.items()}
        error_of(
            LLM,
            models.folder(TARGET),
            unguarded(**settings),
            dtype="float32",
            **options,
            error=(InvalidParameterError, UnsupportedModelError),
            match=message,
        )


@both_kinds
def test_a_head_is_no_target(models, head):
    with pytest.raises(UnsupportedModelError, match="is a head"):
        LLM(head_folder(models, head), dtype="float32")
