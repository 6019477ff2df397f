"""Heads that draft blocks follow their equations, in every layout and after every acceptance."""

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.engine.cached_draft_head import CachedDraftHead
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.models.heads.block_model import BlockHeadModel
from draftwise.outputs import TokenSource
from draftwise.policies import Signal
from draftwise.policies.base import PolicyContext
from draftwise.policies.fixed import FixedLength

from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_blocks import LAYOUTS
from ..tiny_models import Recipe
from .assembly import generate, token_ids
from .blocks import HEAD, TARGET, published_confidence, published_logits
from .heads import engine_with_head, recorded_drafts

PROMPTS = [[1], [3, 0, 2, 2, 1, 7, 11], [5, 4], [(i * 7) % 12 for i in range(21)]]
LONG = TARGET.draft(0.0, context=256)
PREFIX = [(5 * i * i + i) % 12 for i in range(100)]
KINDS = {
    "dflash": HEAD,
    "vanilla": HEAD.changed(markov="vanilla"),
    "gated": HEAD.changed(markov="gated", confidence=True),
    "rnn": HEAD.changed(markov="rnn"),
    "dflash-2": HEAD.changed(second=True),
}
WINDOWED = HEAD.changed(windows=(6, 6), markov="vanilla")


def folder_of(models, head, layout="z-lab"):
    """The folder of a head, written once."""
    folder = models._root / f"block-{abs(hash(repr((head, layout))))}"
    return str(folder) if folder.is_dir() else head.save(folder, layout)


def params(count, **changes):
    defaults = {"max_tokens": 24, "temperature": 1.0}
    return [SamplingParams(**{**defaults, "seed": seed, **changes}) for seed in range(count)]


def engine_of(models, head, layout="z-lab", target=TARGET, **settings):
    defaults = {"num_speculative_tokens": 8, "caches_prefixes": False, "proposals": "sampled"}
    folder = folder_of(models, head, layout)
    return engine_with_head(models, target, folder=folder, **{**defaults, **settings})


def farthest(models, drafts, head, target=TARGET, **settings):
    """The largest difference between log-probabilities of drafts and those of the equations."""
    ids, reference, largest = head.target_ids(), models.reference(target), 0.0
    for drafted in drafts:
        logits = published_logits(reference, head, drafted.text, drafted.tokens, **settings)
        got = drafted.q[:, ids]
        assert got.sum() == pytest.approx(len(drafted.tokens), abs=1e-4)
        expected = logits.softmax(dim=-1)
        assert torch.equal(got > 0, expected > 0)
        difference = (got.log() - expected.log())[expected > 0]
        largest = max(largest, float(difference.abs().max()))
    return largest


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_follow_the_equations(models, kind):
    """In batches, with prompts in chunks, before and after partial acceptances, in all layouts."""
    said = []
    for layout in LAYOUTS:
        # Only one layout knows both conventions of slots.
        for discards in {"z-lab": [True], "deepspec": [False], "speculators": [True, False]}[
            layout
        ]:
            head = KINDS[kind].changed(discards_anchor=discards)
            engine = engine_of(models, head, layout, max_chunk_tokens=9)
            drafts = recorded_drafts(engine)
            outputs = generate(engine, PROMPTS, params(len(PROMPTS)))
            assert sum(each.speculation.num_accepted for each in outputs) > 0
            assert max(len(each.tokens) for each in drafts) == head.num_drafted
            assert farthest(models, drafts, head) < 1e-4
            said.append((discards, token_ids(outputs), [each.tokens for each in drafts]))
    for discards in [True, False]:
        first, *others = [rest for own, *rest in said if own == discards]
        assert all(other == first for other in others)


@pytest.mark.slow
def test_wrong_conventions_are_noticed(models):
    """Each is a small change of one setting, after which nothing fits the equations."""
    head = KINDS["vanilla"]
    for layout, changes, settings in [
        ("z-lab", {}, {"layers": (0, 1)}),
        ("speculators", {"sample_from_anchor": True}, {}),
        ("speculators", {"aux_hidden_state_layer_ids": [1, 2]}, {}),
        ("speculators", {"mask_token_id": 4}, {}),
        ("speculators", {"markov_rank": 0, "markov_head_type": None}, {}),
    ]:
        without = ()
        if changes.get("markov_rank") == 0:
            without = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
        folder = models._root / f"wrong-{abs(hash(repr((layout, changes))))}"
        head.save(folder, layout, changes, without)
        target = TARGET.draft(0.0, config={"num_hidden_layers": 3})
        engine = engine_with_head(
            models,
            target,
            folder=str(folder),
            num_speculative_tokens=4,
            caches_prefixes=False,
            proposals="sampled",
        )
        drafts = recorded_drafts(engine)
        generate(engine, PROMPTS, params(len(PROMPTS)))
        assert farthest(models, drafts, head, target, **settings) > 0.05, (layout, changes)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("changes", "layout", "settings"),
    [
        ({"windows": (6, None)}, "z-lab", {}),
        ({"windows": (6, None)}, "speculators", {"from_anchor": True}),
        ({"windows": (6, 6), "causal": False}, "z-lab", {}),
        ({"windows": (6, 6), "causal": False}, "speculators", {"from_anchor": True}),
        ({"windows": (3, 3), "causal": False}, "z-lab", {}),
        ({"draft_vocab": 9}, "speculators", {}),
        ({"own_embedding": True, "own_projection": True}, "deepspec", {}),
    ],
)
def test_variants(models, changes, layout, settings):
    head = HEAD.changed(markov="vanilla", discards_anchor=layout != "deepspec", **changes)
    engine = engine_of(models, head, layout, LONG)
    drafts = recorded_drafts(engine)
    generate(engine, [*PROMPTS, PREFIX], params(5, max_tokens=40))
    assert farthest(models, drafts, head, LONG, **settings) < 1e-4


def test_scales_of_published_configurations(models):
    """Factors and limits that DFlash has for some targets."""
    settings = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    head = HEAD.changed(settings=settings)
    engine = engine_of(models, head)
    drafts = recorded_drafts(engine)
    generate(engine, PROMPTS, params(len(PROMPTS)))
    reference = models.reference(TARGET)
    for drafted in drafts:
        logits = 0.5 * published_logits(reference, head, drafted.text, drafted.tokens)
        expected = (2.0 * torch.tanh(logits / 2.0)).log_softmax(dim=-1)
        assert torch.allclose(drafted.q.log(), expected, atol=1e-4)


@pytest.mark.parametrize("head", [KINDS["rnn"], WINDOWED], ids=["all-tokens", "windows"])
def test_prefixes_are_restored_with_what_the_head_read(models, head):
    engine = engine_of(models, head, target=LONG, max_chunk_tokens=32, caches_prefixes=True)
    drafts = recorded_drafts(engine)
    prompts = [PREFIX[: 30 + 10 * at] for at in range(6)]
    first = generate(engine, prompts, params(6))
    again = generate(engine, prompts, params(6))
    assert token_ids(again) == token_ids(first)
    assert all(each.num_cached_tokens >= 16 for each in again)
    assert farthest(models, drafts, head, LONG) < 1e-4


@pytest.mark.parametrize("head", [KINDS["gated"], WINDOWED], ids=["all-tokens", "windows"])
def test_interrupted_steps_are_repeated(models, head, monkeypatch):
    settings = {"max_chunk_tokens": 8, "target": LONG}
    prompts = [[at, 3, 5, 7, 1, 2, 4, 6, 8, 1, 3] for at in range(5)]
    expected = token_ids(generate(engine_of(models, head, **settings), prompts, params(5)))
    engine = engine_of(models, head, **settings)
    drafts = recorded_drafts(engine)
    requests = [engine.add(None, p, each) for p, each in zip(prompts, params(5), strict=True)]
    read, count = BlockHeadModel.read, [0]

    def failing(self, *arguments):
        count[0] += 1
        if count[0] in {1, 2, 5, 9, 10, 14}:
            raise KeyboardInterrupt
        output = read(self, *arguments)
        if count[0] in {12, 17}:
            raise KeyboardInterrupt
        return output

    monkeypatch.setattr(BlockHeadModel, "read", failing)
    raised = 0
    while engine.num_unfinished:
        try:
            engine.step()
        except KeyboardInterrupt:
            raised += 1
    assert raised == 8
    assert token_ids([request.output() for request in requests]) == expected
    assert farthest(models, drafts, head, LONG) < 1e-4


def test_states_that_an_interrupt_lost_end_the_drafts_of_their_request(models, monkeypatch):
    greedy = params(4, temperature=0.0)
    prompts = [[at, 3, 5] for at in range(4)]
    expected = token_ids(generate(engine_of(models, HEAD), prompts, greedy))
    engine = engine_of(models, HEAD)
    requests = [engine.add(None, p, each) for p, each in zip(prompts, greedy, strict=True)]
    commit, count = CachedDraftHead.commit, [0]

    def failing(self, changes):
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        commit(self, changes)

    monkeypatch.setattr(CachedDraftHead, "commit", failing)
    engine.step()
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.num_unfinished:
        engine.step()
    assert token_ids([request.output() for request in requests]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "rnn", "dflash-2"])
def test_greedy_texts_are_the_target_s(models, kind):
    """With every kind of policy, alone and in batches, with and beside copied text."""
    greedy = params(len(PROMPTS), temperature=0.0, max_tokens=30)
    plain = engine_of(models, KINDS[kind], policy="none")
    expected = token_ids(generate(plain, PROMPTS, greedy))
    for settings in [
        {"policy": "fixed"},
        {"policy": "fixed", "num_speculative_tokens": 2},
        {"policy": "svip", "max_batch_size": 1},
        {"policy": "adaptive"},
        {"policy": "sv"},
        {"drafts": ("suffix",)},
        {"overlaps": True},
    ]:
        engine = engine_of(models, KINDS[kind], caches_prefixes=True, **settings)
        for _ in range(2):  # the second time with stored prefixes
            assert token_ids(generate(engine, PROMPTS, greedy)) == expected, settings


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3, "logit_bias": {2: 3.0, 5: -100.0, 11: 1.0}},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "top_k": 5},
        {"temperature": 0.0},
        {"min_p": 0.1, "top_p": 0.8},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_kernels_draw_what_operations_draw(models, request, kind, changes):
    """Over a part of the vocabulary, in batches of requests with other settings."""
    head = KINDS[kind].changed(draft_vocab=9, discards_anchor=False)
    each = params(4)
    each[1], each[2] = params(2, **changes)
    said = []
    for operations in (False, True):
        if operations:
            request.getfixturevalue("operations")
        for proposals in ("sampled", "one-hot"):
            engine = engine_of(models, head, "speculators", proposals=proposals, policy="svip")
            outputs = generate(engine, PROMPTS, each)
            said.append([output.speculation.num_accepted for output in outputs])
            said[-1] += token_ids(outputs)
    assert said[:2] == said[2:]


def test_short_drafts_are_the_beginnings_of_long_ones(models):
    """A shorter draft takes the first positions of the same block."""
    for head in KINDS.values():
        first = []
        for gamma in (1, 2, 4):
            engine = engine_of(models, head, num_speculative_tokens=gamma)
            drafted, propose = [], engine._pipeline.propose

            def recorded(batch, drafted=drafted, propose=propose):
                draft = propose(batch)
                drafted.append(draft.host_tokens[0] if draft.tokens.numel() else [])
                return draft

            engine._pipeline.propose = recorded
            generate(engine, PROMPTS[1:2], params(1, temperature=0.0))
            first.append(next(tokens for tokens in drafted if tokens))
        assert [len(tokens) for tokens in first] == [1, 2, 4]
        assert all(tokens == first[-1][: len(tokens)] for tokens in first)


def test_texts_up_to_the_end_of_the_context(models):
    """A block that reaches beyond the context is drafted as far as there is room."""
    target = TARGET.draft(0.0, context=32)
    prompts = [[1] * 20, [2] * 28, [3, 4]]
    greedy = params(3, temperature=0.0, max_tokens=40)
    expected = generate(engine_of(models, HEAD, target=target, policy="none"), prompts, greedy)
    outputs = generate(engine_of(models, HEAD, target=target), prompts, greedy)
    assert token_ids(outputs) == token_ids(expected)
    assert all(len(each.prompt_token_ids) + len(each.token_ids) == 32 for each in outputs)
    assert all(each.speculation.num_drafted for each in outputs)


def test_one_hot_proposals(models):
    """By default where tokens are independent: a seed gives the same text with and without them."""
    sampled = params(len(PROMPTS), max_tokens=40)
    expected = generate(engine_of(models, HEAD, policy="none"), PROMPTS, sampled)
    outputs = generate(engine_of(models, HEAD, proposals=None), PROMPTS, sampled)
    assert token_ids(outputs) == token_ids(expected)
    assert sum(each.speculation.num_accepted for each in outputs)
    sources = {source for output in outputs for source in output.token_sources}
    assert TokenSource.DRAFT in sources
    assert TokenSource.COPY not in sources
    for kind, proposals, is_same in [
        ("vanilla", None, False),
        ("vanilla", "one-hot", True),
        ("dflash", "sampled", False),
    ]:
        engine = engine_of(models, KINDS[kind], proposals=proposals)
        said = token_ids(generate(engine, PROMPTS, sampled))
        assert (said == token_ids(expected)) == is_same, kind


def test_an_llm_drafts_with_a_folder(models):
    prompts = [[1, 2, 3], [4, 5]]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(models.folder(TARGET), dtype="float32")
    expected = [each.token_ids for each in plain.generate(prompts, greedy)]
    for kind, method in [("dflash", "dflash"), ("rnn", "dspark")]:
        folder = folder_of(models, KINDS[kind])
        for speculation in [
            unguarded(folder, policy="fixed", num_speculative_tokens=3),
            {"method": method, "model": folder, "policy": "adaptive"},
            {"draft": ["suffix", folder]},
        ]:
            outputs = LLM(models.folder(TARGET), speculation, dtype="float32").generate(
                prompts, greedy
            )
            assert [each.token_ids for each in outputs] == expected


def test_what_blocks_cannot_do_is_refused(models):
    folder, target = folder_of(models, HEAD), models.folder(TARGET)
    for name, speculation, error, message in [
        ("proposals", {"draft": "suffix", "proposals": "one-hot"}, InvalidParameterError, "leave"),
        ("tree_width", {"draft": folder, "tree_width": 2}, InvalidParameterError, "set it to 1"),
        (
            "companion",
            {"draft": "suffix", "companion": folder, "policy": "sv"},
            UnsupportedModelError,
            "of the kind DFlash, which is no model of its own",
        ),
        ("draft", {"draft": f"{folder}:int8"}, InvalidParameterError, "is not quantised"),
    ]:
        caught = error_of(LLM, target, speculation, dtype="float32", error=error, match=message)
        assert caught.field == name
    for changes, message in [
        ({"vocab": 16}, "a vocabulary of 12, and the target has 16"),
        ({"config": {"num_hidden_layers": 1}}, "those before the last layer of the target are 0"),
    ]:
        other = TARGET.draft(0.0, **changes)
        error_of(engine_of, models, HEAD, target=other, error=UnsupportedModelError, match=message)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_greedy_texts_with_other_targets(models, family):
    """Targets of Draftwise's own passes and of Hugging Face's modules."""
    target = Recipe(family, vocab=12, seed=2, config={"num_hidden_layers": 3})
    if family == "gemma3_text":
        target = Recipe(family, vocab=12, seed=2)
    greedy = params(4, temperature=0.0)
    expected = generate(engine_of(models, HEAD, target=target, policy="none"), PROMPTS, greedy)
    outputs = generate(engine_of(models, HEAD, target=target), PROMPTS, greedy)
    assert token_ids(outputs) == token_ids(expected)
    assert sum(output.speculation.num_verified for output in outputs)


class ReadsConfidence(FixedLength):
    """Keeps the confidence of every draft, and stops some drafts early."""

    signals = frozenset({Signal.CONFIDENCE})

    def __init__(self, context):
        super().__init__(context)
        self.drafts, self.announced = [], []

    def plan_drafts(self, requests):
        self.announced.append([])
        return super().plan_drafts(requests)

    def keep_drafting(self, position):
        self.announced[-1].append((position.requests, position.next_confidence))
        return position.tokens % 5 != 0

    def select(self, draft, companion_scores):
        self.drafts.append(draft)
        return super().select(draft, companion_scores)


@pytest.mark.parametrize(
    ("markov", "settings"),
    [(None, {}), ("gated", {}), ("gated", {"confidence_temperatures": [0.5, 2, 1, 3.0, 0.2]})],
)
def test_confidence_is_known_before_a_token_is_drawn(models, markov, settings):
    """It is that of the equations, and policies see it one position ahead."""
    head = HEAD.changed(markov=markov, confidence=True, discards_anchor=False, settings=settings)
    policy = ReadsConfidence(PolicyContext(8))
    engine = engine_of(models, head, "deepspec", policy_object=policy)
    texts, propose = [], engine._pipeline.propose

    def recorded(batch):
        texts.append([list(request.tokens) for request in batch.generating])
        return propose(batch)

    engine._pipeline.propose = recorded
    generate(engine, PROMPTS, params(len(PROMPTS)))
    reference, lengths = models.reference(TARGET), set()
    for own, draft, announced in zip(texts, policy.drafts, policy.announced, strict=True):
        for row, (text, length) in enumerate(zip(own, draft.lengths, strict=True)):
            if not length:
                continue
            tokens = draft.host_tokens[row][:length]
            expected = published_confidence(reference, head, text, tokens)
            got = draft.signals.confidence[row]
            assert torch.allclose(got[:length], expected, atol=1e-5)
            assert not got[length:].any()
            for place, (requests, confidence) in enumerate(announced[: length - 1]):
                seen = confidence[list(requests).index(row)]
                assert seen == pytest.approx(float(expected[place + 1]), abs=1e-5)
            lengths.add(length)
    assert lengths == {1, 2, 3, 4, 5}


def test_heads_without_confidence_give_none(models):
    policy = ReadsConfidence(PolicyContext(4))
    engine = engine_of(models, KINDS["vanilla"], policy_object=policy)
    generate(engine, PROMPTS, params(len(PROMPTS)))
    drafted = [draft for draft in policy.drafts if any(draft.lengths)]
    assert drafted
    assert all(draft.signals.confidence is None for draft in drafted)


@pytest.mark.slow
def test_greedy_texts_in_bfloat16(models):
    """The states of the target's kernels are those that the head reads."""
    target = LLM(models.folder(TARGET), dtype="bfloat16")
    if not isinstance(target.target.model.native, NativeDecoder):
        pytest.skip("the target is computed by PyTorch on this machine")
    greedy = SamplingParams(temperature=0, max_tokens=30)
    expected = [each.token_ids for each in target.generate(PROMPTS, greedy)]
    for kind in ("rnn", "dflash-2"):
        speculation = unguarded(folder_of(models, KINDS[kind]), policy="fixed")
        outputs = LLM(models.folder(TARGET), speculation, dtype="bfloat16").generate(
            PROMPTS, greedy
        )
        assert [each.token_ids for each in outputs] == expected
        assert sum(each.speculation.num_accepted for each in outputs)
