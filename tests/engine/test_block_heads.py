"""Heads that draft blocks follow their equations, in every layout and after every acceptance."""

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.kernels.native.decoder import NativeDecoder
from draftwise.policies import Signal
from draftwise.policies.base import PolicyContext
from draftwise.policies.fixed import FixedLength

from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_blocks import LAYOUTS
from .assembly import generate, sampled, token_ids
from .blocks import HEAD, KINDS, engine_of, farthest, published_confidence, published_logits
from .heads import TARGET, engine_with_head, head_folder, recorded_drafts
from .target_readers import PREFIX, PROMPTS

LONG = TARGET.draft(0.0, context=256)


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
            outputs = generate(engine, PROMPTS, sampled(len(PROMPTS)))
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
        generate(engine, PROMPTS, sampled(len(PROMPTS)))
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
    generate(engine, [*PROMPTS, PREFIX], sampled(5, max_tokens=40))
    assert farthest(models, drafts, head, LONG, **settings) < 1e-4


def test_scales_of_published_configurations(models):
    """Factors and limits that DFlash has for some targets."""
    settings = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    head = HEAD.changed(settings=settings)
    engine = engine_of(models, head)
    drafts = recorded_drafts(engine)
    generate(engine, PROMPTS, sampled(len(PROMPTS)))
    reference = models.reference(TARGET)
    for drafted in drafts:
        logits = 0.5 * published_logits(reference, head, drafted.text, drafted.tokens)
        expected = (2.0 * torch.tanh(logits / 2.0)).log_softmax(dim=-1)
        assert torch.allclose(drafted.q.log(), expected, atol=1e-4)


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
    each = sampled(4)
    each[1], each[2] = sampled(2, **changes)
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
            generate(engine, PROMPTS[1:2], sampled(1, temperature=0.0))
            first.append(next(tokens for tokens in drafted if tokens))
        assert [len(tokens) for tokens in first] == [1, 2, 4]
        assert all(tokens == first[-1][: len(tokens)] for tokens in first)


def test_an_llm_drafts_with_a_folder(models):
    prompts = [[1, 2, 3], [4, 5]]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(models.folder(TARGET), dtype="float32")
    expected = [each.token_ids for each in plain.generate(prompts, greedy)]
    for kind, method in [("dflash", "dflash"), ("rnn", "dspark")]:
        folder = head_folder(models, KINDS[kind])
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
    folder, target = head_folder(models, HEAD), models.folder(TARGET)
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
    generate(engine, PROMPTS, sampled(len(PROMPTS)))
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
    generate(engine, PROMPTS, sampled(len(PROMPTS)))
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
        speculation = unguarded(head_folder(models, KINDS[kind]), policy="fixed")
        outputs = LLM(models.folder(TARGET), speculation, dtype="bfloat16").generate(
            PROMPTS, greedy
        )
        assert [each.token_ids for each in outputs] == expected
        assert sum(each.speculation.num_accepted for each in outputs)
