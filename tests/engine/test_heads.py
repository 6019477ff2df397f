"""Heads draft by the published forward pass, and see exactly the states of what was kept."""

import pytest

from draftwise import LLM
from draftwise.engine import cached_head
from draftwise.engine.cached_head import CachedHead
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.kernels.native.library import native_library

from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_heads import LAYOUTS
from . import blocks, eagle_heads
from .assembly import generate, sampled, token_ids
from .heads import (
    GAMMA,
    HEAD,
    TARGET,
    assert_published,
    engine_with_head,
    head_folder,
    recorded_drafts,
)
from .target_readers import PREFIX, PROMPTS

LONG = TARGET.draft(0.0, context=256)

HEADS = {
    "plain": HEAD.changed(settings={}),
    "norm-before-residual": HEAD,
    "all-tokens": HEAD.changed(draft_vocab=12),
    "norm-before-fc": HEAD.changed(settings={"norm_before_fc": True}),
    "fc-norm": HEAD.changed(settings={"fc_norm": True, "norm_output": True}),
    "qwen": HEAD.changed(qwen=True, own_embedding=True),
    "other-width": HEAD.changed(hidden=24, own_embedding=True),
    "two-layers": HEAD.changed(num_layers=2),
    "windows": HEAD.changed(
        num_layers=2,
        layer={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    ),
    "scaled": HEAD.changed(settings={"logit_scale": 0.7}),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", HEADS)
def test_drafts_follow_the_published_pass(models, name):
    """In batches, with prompts in chunks, before and after partial acceptances."""
    head = HEADS[name]
    engine = engine_with_head(
        models, head=head, num_speculative_tokens=GAMMA, max_chunk_tokens=9, caches_prefixes=False
    )
    drafts = recorded_drafts(engine)
    outputs = generate(engine, PROMPTS, sampled(len(PROMPTS)))
    accepted = [output.speculation.num_accepted for output in outputs]
    verified = [output.speculation.num_verified for output in outputs]
    assert 0 < sum(accepted) < sum(verified)
    assert_published(models, drafts, head)


@pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")
@pytest.mark.parametrize("name", ["norm-before-residual", "qwen", "two-layers"])
def test_states_may_be_read_in_a_pass_without_logits(models, name, monkeypatch):
    head, read, num_read = HEADS[name], CachedHead._read_context, []

    def counted(self, requests, segments):
        num_read.extend(segment.num_tokens for segment in segments)
        read(self, requests, segments)

    monkeypatch.setattr(CachedHead, "_read_context", counted)
    texts = []
    for least in (10**9, 1):
        monkeypatch.setattr(cached_head, "_MANY_STATES", least)
        engine = engine_with_head(
            models,
            head=head,
            num_speculative_tokens=GAMMA,
            max_chunk_tokens=9,
            caches_prefixes=False,
        )
        drafts = recorded_drafts(engine)
        num_read.clear()
        texts.append(token_ids(generate(engine, PROMPTS, sampled(len(PROMPTS)))))
        # A head with several layers needs the outputs of all but the last.
        assert bool(num_read) == (least == 1 and name != "two-layers")
        assert_published(models, drafts, head)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [None, (1, 3, 4), (0, 8)])
def test_layouts_and_layer_ids(models, layout, layers):
    """The ids may be left out, name any number of states, and include the last layer's output."""
    target = TARGET.draft(0.0, config={"num_hidden_layers": 8})
    head = HEAD.changed(layers=layers, seed=5)
    folder = head_folder(models, head, layout)
    engine = engine_with_head(models, target, head, folder, num_speculative_tokens=GAMMA)
    drafts = recorded_drafts(engine)
    generate(engine, PROMPTS, sampled(len(PROMPTS)))
    assert_published(models, drafts, head, target, layers or (2, 4, 5))


def test_a_prefix_ends_before_an_entry_that_depends_on_another_token(models):
    """The head's entry of a position depends on the next token, too."""
    engine = engine_with_head(models, LONG, num_speculative_tokens=5)
    drafts = recorded_drafts(engine)
    generate(engine, [PREFIX[:60]], sampled(1))
    same, other = [*PREFIX[:33], 5], [*PREFIX[:32], (PREFIX[32] + 1) % 12, 5, 6]
    outputs = [generate(engine, [prompt], sampled(1))[0] for prompt in (same, other)]
    assert [output.num_cached_tokens for output in outputs] == [32, 16]
    assert_published(models, drafts, HEAD, LONG)


def test_heads_of_other_targets_are_refused(models):
    sizes = {"num_hidden_layers": 2, "hidden_size": 32}
    width = "a hidden size of 16, and the target has 32"
    one_layer = {"config": {"num_hidden_layers": 1}}
    cases = [
        (HEAD, one_layer, "the target has 1 layers"),
        (blocks.HEAD, one_layer, "those before the last layer of the target are 0"),
    ]
    eagles = eagle_heads.HEAD, eagle_heads.SPECULATORS
    cases += [(head, {"config": sizes}, width) for head in (HEAD, *eagles)]
    cases += [
        (head, {"vocab": 16}, "a vocabulary of 12, and the target has 16")
        for head in (HEAD, *eagles, blocks.HEAD)
    ]
    for head, changes, message in cases:
        target = TARGET.draft(0.0, **changes)
        caught = error_of(
            engine_with_head, models, target, head, error=UnsupportedModelError, match=message
        )
        assert caught.field == "draft", (head, changes)
        assert "\n" not in caught.message


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


@pytest.mark.parametrize("head", [HEAD, eagle_heads.HEAD], ids=["eagle-3", "eagle-1"])
def test_a_head_is_no_target(models, head):
    with pytest.raises(UnsupportedModelError, match="is a head"):
        LLM(head_folder(models, head), dtype="float32")
