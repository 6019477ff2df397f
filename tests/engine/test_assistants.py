"""Drafts of assistants that read the target's keys and values."""

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.engine.cached_assistant import CachedAssistant

from ..stand_ins import unguarded
from ..tiny_assistants import CASES, expected_logits, make_assistant
from .test_lossless import NOT_UNLIKELY, Case

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
# Of lengths below and above the window of 8. The last one is longer than its ring.
LENGTHS = [1, 6, 11, 16, 21, 26, 31, 150]
PROMPTS = [[(7 * at + place) % 8 for place in range(size)] for at, size in enumerate(LENGTHS)]


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture
def made(case, tmp_path):
    """The folders of a target and its assistant, and both as transformers computes them."""
    return make_assistant(case, tmp_path)


def load(made, draft=None, overlap=None, **settings):
    target, assistant, *_ = made
    speculation = unguarded(
        draft or assistant, **{"policy": "fixed", "num_speculative_tokens": 4, **settings}
    )
    # In small chunks, so that sliding layers have rings.
    return LLM(
        target,
        speculation,
        dtype="float32",
        max_batch_size=4,
        max_chunk_tokens=16,
        overlap=overlap,
    )


def record_logits(monkeypatch):
    """The logits of each pass, by the tokens of each request and what was drafted after them."""
    texts, record = {}, {}
    read, read_one = CachedAssistant.read, CachedAssistant.read_one

    def first(self, inputs):
        inputs = list(inputs)
        logits, count = read(self, inputs)
        drafting = sorted(
            (each.request for each in inputs if each.num_logits), key=lambda one: one.cache_slot
        )
        for row, request in enumerate(drafting):
            texts[request.cache_slot] = (tuple(request.tokens), ())
            record[texts[request.cache_slot]] = logits[row]
        return logits, count

    def next_one(self, rows, tokens):
        logits = read_one(self, rows, tokens)
        for at, (slot, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            text, drafted = texts[slot]
            texts[slot] = (text, (*drafted, token))
            record[texts[slot]] = logits[at]
        return logits

    monkeypatch.setattr(CachedAssistant, "read", first)
    monkeypatch.setattr(CachedAssistant, "read_one", next_one)
    return record


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_are_those_of_transformers(made, case, monkeypatch, temperature):
    """In every pass of every step: after drafts that were accepted in part, wholly and not at all,
    and after stored prefixes."""
    _, _, main, assistant = made
    record = record_logits(monkeypatch)
    llm = load(made)
    assert llm.engine.pipeline.proposer.cached_model.cache.has_rings
    params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True, seed=1)
    accepted = {each.speculation.num_accepted for each in llm.generate(PROMPTS, params)}
    assert len(accepted) > 1
    llm.generate(PROMPTS, params)
    assert llm.engine.prefix_stats.num_hits
    assert max(map(len, [drafted for _, drafted in record])) == 3
    for text, drafted in record:
        expected = expected_logits(case, main, assistant, list(text), [*drafted, 0])[-1]
        error = (record[text, drafted] - expected).abs().max()
        assert error < 1e-4 * expected.std(), (len(text), drafted)


def test_drafts_do_not_change_texts(made):
    target, assistant, *_ = made
    plain = LLM(target, dtype="float32", max_batch_size=4)
    expected = [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]
    for draft in (assistant, ["suffix", assistant]):
        for policy in ("fixed", "svip", "adaptive"):
            llm = load(made, draft, policy=policy)
            for _ in range(2):  # the second time with stored prefixes
                outputs = llm.generate(PROMPTS, GREEDY)
                assert [output.token_ids for output in outputs] == expected
            assert policy == "adaptive" or any(each.speculation.num_drafted for each in outputs)


def test_halves_of_a_batch_draft_in_turn(made):
    expected = [output.token_ids for output in load(made).generate(PROMPTS, GREEDY)]
    outputs = load(made, overlap=True).generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert sum(each.speculation.num_accepted for each in outputs)


def test_drafts_with_penalties_do_not_change_texts(made):
    target, *_ = made
    params = [
        SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=0.5 * (at % 2)
        )
        for at in range(len(PROMPTS))
    ]
    plain = LLM(target, dtype="float32", max_batch_size=4)
    expected = [output.token_ids for output in plain.generate(PROMPTS, params)]
    assert [each.token_ids for each in load(made).generate(PROMPTS, params)] == expected


def test_a_row_does_not_depend_on_the_other_rows(made, monkeypatch):
    record = record_logits(monkeypatch)
    load(made).generate(PROMPTS, GREEDY)
    together = dict(record)
    for prompt in PROMPTS[::3]:
        record.clear()
        load(made).generate([prompt], GREEDY)
        for key, logits in record.items():
            assert torch.allclose(logits, together[key], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "draft", "policy", "verification"),
    [
        ("all tokens", None, "fixed", "block"),
        ("ordered", None, "fixed", "token"),
        ("ordered", None, "svip", "block"),
        ("ordered", "suffix", "fixed", "block"),
    ],
    indirect=["case"],
)
def test_texts_follow_the_target(made, case, draft, policy, verification):
    target, assistant, reference, _ = made
    speculation = unguarded(
        [draft, assistant] if draft else assistant,
        policy=policy,
        num_speculative_tokens=3,
        verification=verification,
    )
    engine = LLM(target, speculation, dtype="float32", max_batch_size=256).engine
    asked = Case(policy, verification, 3, num_requests=4000)
    tokens, requests = asked.said_by(engine)
    stats = [request.stats for request in requests]
    assert 0 < sum(each.num_accepted for each in stats) < sum(each.num_drafted for each in stats)
    assert min(asked.p_values_of(reference, tokens)) > NOT_UNLIKELY
