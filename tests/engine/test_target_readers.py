"""What holds for every draft that reads the target's states, whatever happens to requests."""

from contextlib import contextmanager, nullcontext

import pytest

from draftwise import LLM, SamplingParams, StructuredOutputs
from draftwise.engine import cached_draft_head
from draftwise.engine.cached_draft_head import CachedDraftHead
from draftwise.errors import EngineError, SlowPathWarning
from draftwise.outputs import TokenSource
from draftwise.policies.base import PolicyContext

from ..stand_ins import unguarded
from ..tiny_models import Recipe
from . import eagle_heads, heads
from .assembly import (
    assert_same_with_cancellations,
    generate,
    sampled,
    token_ids,
    varied_work,
)
from .heads import recorded_drafts
from .recording import Recorder
from .target_readers import HEADS, KINDS, PREFIX, PROMPTS

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_head = pytest.mark.parametrize("kind", HEADS.values(), ids=HEADS)


@pytest.mark.slow
@every_head
def test_greedy_texts_are_the_target_s(models, kind):
    """With every kind of policy, alone and in batches, with and beside copied text."""
    greedy = sampled(len(PROMPTS), temperature=0.0, max_tokens=30)
    expected = token_ids(generate(kind.engine(models, policy="none"), PROMPTS, greedy))
    for settings in [
        {"policy": "fixed"},
        {"policy": "fixed", "num_speculative_tokens": 1},
        {"policy": "svip", "max_batch_size": 1},
        {"policy": "adaptive"},
        {"policy": "sv"},
        {"drafts": ("suffix",)},
        {"overlaps": True},
    ]:
        engine = kind.engine(models, **settings)
        for _ in range(2):  # the second time with stored prefixes
            assert token_ids(generate(engine, PROMPTS, greedy)) == expected, settings


@pytest.mark.slow
@every_kind
def test_prefixes_are_restored_with_what_the_draft_read(models, kind):
    engine = kind.engine(models, kind.long(), max_chunk_tokens=32)
    drafts = recorded_drafts(engine)
    prompts, params = [PREFIX[: 30 + 10 * at] for at in range(6)], sampled(6, max_tokens=20)
    first = generate(engine, prompts, params)
    turns = [[*output.prompt_token_ids, *output.token_ids, 7, 8] for output in first]
    second = generate(engine, turns, params)
    again = generate(engine, prompts, params)
    assert token_ids(again) == token_ids(first)
    assert all(each.num_cached_tokens >= 16 for each in [*again, *second])
    # What was accepted in the last step of a request is not read any more.
    assert any(each.num_cached_tokens >= 80 for each in second)
    kind.check(models, drafts, kind.long())


@pytest.mark.slow
@every_kind
def test_a_draft_that_skips_steps_catches_up(models, kind, monkeypatch):
    """A policy that drafts nothing in most steps: waiting states are bounded and read in time."""
    monkeypatch.setattr(cached_draft_head, "_MAX_PENDING", 4)
    waiting, commit = [], CachedDraftHead.commit

    def checked(self, changes):
        commit(self, changes)
        for request in changes.requests:
            slot = request.cache_slot
            waiting.append(self._pending[slot].end - self.cache.lengths[slot])

    monkeypatch.setattr(CachedDraftHead, "commit", checked)
    engine = kind.engine(
        models, policy_object=Recorder(PolicyContext(5)), max_batch_size=4, caches_prefixes=False
    )
    drafts = recorded_drafts(engine)
    generate(engine, [[at, 3, 5] for at in range(8)], sampled(8, max_tokens=30))
    assert (1 < max(waiting, default=0) <= 4 + 6) == kind.is_head
    kind.check(models, drafts, kind.target)


@contextmanager
def failing_passes(kind, monkeypatch, error, before, after=()):
    """Errors before and after some of the draft's passes, by their numbers. Yields the errors."""
    owner, name = kind.passes
    run, count, raised = getattr(owner, name), [0], []

    def failing(self, *arguments, **named):
        count[0] += 1
        if count[0] in before:
            raised.append(error)
            raise error
        output = run(self, *arguments, **named)
        if count[0] in after:
            raised.append(error)
            raise error
        return output

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        yield raised


def finished(engine, requests, error):
    """The outputs of requests, in steps of which some end in an error."""
    while engine.num_unfinished:
        try:
            engine.step()
        except type(error):
            continue
    return [request.output() for request in requests]


@pytest.mark.slow
@every_kind
@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=repr)
def test_interrupted_steps_are_repeated_and_failed_ones_end_their_requests(
    models, kind, error, monkeypatch
):
    settings = {"max_chunk_tokens": 8, "caches_prefixes": False}
    prompts = [[at, 3, 5, 7, 1, 2, 4, 6, 8, 1, 3] for at in range(5)]
    params = sampled(5, max_tokens=20)
    expected = token_ids(generate(kind.engine(models, **settings), prompts, params))
    engine = kind.engine(models, **settings)
    drafts = recorded_drafts(engine)
    requests = [engine.add(None, *each) for each in zip(prompts, params, strict=True)]
    with failing_passes(kind, monkeypatch, error, {1, 2, 5, 9, 10, 14}, {12, 17}) as raised:
        outputs = finished(engine, requests, error)
    assert raised
    if isinstance(error, KeyboardInterrupt):
        assert len(raised) > 4
        assert token_ids(outputs) == expected
    else:
        assert all(isinstance(output.error, EngineError) for output in outputs)
        assert token_ids(generate(engine, prompts, params)) == expected
    kind.check(models, drafts, kind.target)


@every_head
@pytest.mark.parametrize("interrupted_commit", [1, 3])
def test_states_that_an_interrupt_lost_end_the_drafts_of_their_request(
    models, kind, interrupted_commit, monkeypatch
):
    """The texts stay those of the target, and other requests are drafted for."""
    prompts, greedy = [[at, 3, 5] for at in range(4)], sampled(4, temperature=0.0)
    expected = token_ids(generate(kind.engine(models), prompts, greedy))
    engine = kind.engine(models)
    requests = [engine.add(None, *each) for each in zip(prompts, greedy, strict=True)]
    commit, count = CachedDraftHead.commit, [0]

    def failing(self, changes):
        count[0] += 1
        if count[0] == interrupted_commit:
            raise KeyboardInterrupt
        commit(self, changes)

    monkeypatch.setattr(CachedDraftHead, "commit", failing)
    for _ in range(interrupted_commit - 1):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.num_unfinished:
        engine.step()
    assert token_ids([request.output() for request in requests]) == expected
    drafts = recorded_drafts(engine)
    generate(engine, prompts, sampled(4))
    kind.check(models, drafts, kind.target)


@pytest.mark.parametrize(
    ("name", "overlaps"),
    [*((name, False) for name in KINDS), ("eagle-3", True), ("eagle-1", True), ("dspark", True)],
)
def test_requests_that_join_and_leave(models, name, overlaps):
    kind, settings = KINDS[name], {"max_batch_size": 8}
    prompts, work = varied_work(30, vocab=12)
    greedy = [SamplingParams(max_tokens=each.max_tokens, temperature=0.0) for each in work]
    plain = kind.engine(models, policy="none", **settings)
    engine = kind.engine(models, **settings, **({"overlaps": True} if overlaps else {}))
    assert token_ids(generate(engine, prompts, greedy)) == token_ids(
        generate(plain, prompts, greedy)
    )
    assert_same_with_cancellations(engine, token_ids(generate(engine, prompts, work)), vocab=12)


@every_head
def test_with_known_continuations(models, kind):
    """The hybrid of copied text and a head."""
    prompts = [[*([1, 2, 3, 4, 5] * 4), at] for at in range(6)]
    greedy = sampled(6, temperature=0.0, max_tokens=40)
    expected = token_ids(generate(kind.engine(models, policy="none"), prompts, greedy))
    outputs = generate(kind.engine(models, drafts=("suffix",)), prompts, greedy)
    assert token_ids(outputs) == expected
    sources = {source for output in outputs for source in output.token_sources}
    assert {TokenSource.COPY, TokenSource.DRAFT} <= sources


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("kind", [HEADS["eagle-3"], HEADS["dflash"]], ids=["eagle-3", "dflash"])
def test_greedy_texts_with_other_targets(models, kind, family):
    """Targets of Draftwise's own passes and of Hugging Face's modules."""
    target = Recipe(family, vocab=12, seed=2, config={"num_hidden_layers": 3})
    if family == "gemma3_text":
        target = Recipe(family, vocab=12, seed=2)
    greedy = sampled(4, temperature=0.0, max_tokens=20)
    expected = generate(kind.engine(models, target, policy="none"), PROMPTS, greedy)
    outputs = generate(kind.engine(models, target), PROMPTS, greedy)
    assert token_ids(outputs) == token_ids(expected)
    assert sum(output.speculation.num_verified for output in outputs)


@every_kind
def test_texts_up_to_the_end_of_the_context(models, kind):
    """A draft that reaches beyond the context is as long as there is room."""
    target = kind.target.draft(0.0, context=32)
    prompts, greedy = [[1] * 20, [2] * 27, [3, 4]], sampled(3, temperature=0.0, max_tokens=40)
    expected = generate(kind.engine(models, target, policy="none"), prompts, greedy)
    outputs = generate(kind.engine(models, target), prompts, greedy)
    assert token_ids(outputs) == token_ids(expected)
    assert all(len(each.prompt_token_ids) + len(each.token_ids) == 32 for each in outputs)
    assert all(each.speculation.num_drafted for each in outputs)


@pytest.mark.parametrize(
    ("name", "proposals", "is_same"),
    [
        ("p-eagle", None, True),
        ("p-eagle", "sampled", False),
        ("dflash", None, True),
        ("dflash", "sampled", False),
        ("dspark, vanilla", None, False),
        ("dspark, vanilla", "one-hot", True),
    ],
)
def test_one_hot_proposals(models, name, proposals, is_same):
    """By default where tokens are independent: a seed gives the same text with and without them."""
    kind, params = HEADS[name], sampled(len(PROMPTS), max_tokens=40)
    expected = token_ids(generate(kind.engine(models, policy="none"), PROMPTS, params))
    outputs = generate(kind.engine(models, proposals=proposals), PROMPTS, params)
    assert (token_ids(outputs) == expected) == is_same
    assert sum(each.speculation.num_accepted for each in outputs)
    sources = {source for output in outputs for source in output.token_sources}
    assert TokenSource.DRAFT in sources
    assert TokenSource.COPY not in sources


@pytest.mark.parametrize("head", [heads.HEAD, eagle_heads.HEAD], ids=["eagle-3", "eagle-1"])
def test_a_grammar_restricts_drafts_and_a_warning_names_the_slow_path(models, head):
    target = Recipe(vocab=40, seed=3, tokenizer=True, config={"eos_token_id": 1})
    is_slow = head is eagle_heads.HEAD
    head = head.changed(vocab=40) if is_slow else head.changed(vocab=40, draft_vocab=40)
    settings = unguarded(draft=heads.head_folder(models, head), policy="fixed")
    warned = pytest.warns(SlowPathWarning, match="it is of EAGLE-1 or EAGLE-2")
    with warned if is_slow else nullcontext():
        llm = LLM(models.folder(target), settings, dtype="float32")
    limits = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(regex="[ab]{8}"))
    outputs = llm.generate([[3, 4, 5], [6, 7]], limits)
    assert all(set(output.text) <= set("ab") for output in outputs)
    assert all(len(output.text) == 8 for output in outputs)
