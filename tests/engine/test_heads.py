"""Heads draft by the published forward pass, and see exactly the states of what was kept."""

import pytest
import torch

from draftwise import SamplingParams

from ..tiny_heads import LAYOUTS
from .assembly import generate, token_ids
from .heads import HEAD, TARGET, engine_with_head, head_folder, published_logits, recorded_drafts

GAMMA = 5
PROMPTS = [[1], [3, 0, 2, 2, 1, 7, 11], [5, 4], [(i * 7) % 12 for i in range(21)]]
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0)

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


def params(count, **changes):
    return [SamplingParams(**{**vars(SAMPLED), "seed": seed, **changes}) for seed in range(count)]


def assert_published(models, drafts, head, target=TARGET, layers=None):
    """Every drafted token's logits are those of the published forward pass, up to a constant."""
    ids, reference = head.target_ids(), models.reference(target)
    partial = 0
    for drafted in drafts:
        expected = published_logits(reference, head, drafted.text, drafted.tokens, layers)
        got = drafted.q[:, ids].log()
        assert torch.allclose(got, expected.log_softmax(dim=-1), atol=1e-4)
        # No other token has any probability.
        assert drafted.q.sum() == pytest.approx(len(drafted.tokens), abs=1e-4)
        assert drafted.q[:, ids].sum() == pytest.approx(len(drafted.tokens), abs=1e-4)
        partial += len(drafted.tokens) == GAMMA
    assert partial


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", HEADS)
def test_drafts_follow_the_published_pass(models, name):
    """In batches, with prompts in chunks, before and after partial acceptances."""
    head = HEADS[name]
    engine = engine_with_head(
        models, head=head, num_speculative_tokens=GAMMA, max_chunk_tokens=9, caches_prefixes=False
    )
    drafts = recorded_drafts(engine)
    outputs = generate(engine, PROMPTS, params(len(PROMPTS)))
    accepted = [output.speculation.num_accepted for output in outputs]
    verified = [output.speculation.num_verified for output in outputs]
    assert 0 < sum(accepted) < sum(verified)
    assert_published(models, drafts, head)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [None, (1, 3, 4), (0, 8)])
def test_layouts_and_layer_ids(models, layout, layers):
    """The ids may be left out, name any number of states, and include the last layer's output."""
    target = TARGET.draft(0.0, config={"num_hidden_layers": 8})
    head = HEAD.changed(layers=layers, seed=5)
    folder = head_folder(models, head, layout)
    engine = engine_with_head(models, target, head, folder, num_speculative_tokens=GAMMA)
    drafts = recorded_drafts(engine)
    generate(engine, PROMPTS, params(len(PROMPTS)))
    assert_published(models, drafts, head, target, layers or (2, 4, 5))


def test_greedy_texts_are_the_target_s(models):
    greedy = params(len(PROMPTS), temperature=0.0)
    expected = None
    for settings in ({"policy": "none"}, {}, {"num_speculative_tokens": 1}, {"policy": "svip"}):
        engine = engine_with_head(models, **settings)
        said = token_ids(generate(engine, PROMPTS, greedy))
        expected = expected or said
        assert said == expected
