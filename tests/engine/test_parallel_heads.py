"""Heads of P-EAGLE follow their equations in one pass, and keep the target's texts."""

import pytest
import torch

from draftwise import SamplingParams
from draftwise.checkpoints.heads import HeadKind, read_head
from draftwise.errors import UnsupportedModelError
from draftwise.models.heads.loading import check_head_kind

from ..refusals import error_of
from ..tiny_heads import LAYOUTS, HeadRecipe
from .assembly import generate, token_ids
from .heads import (
    TARGET,
    engine_with_head,
    head_layers,
    projected,
    recorded_drafts,
    rms_norm,
    target_states,
)

MASK = 5
PROMPTS = [[1], [3, 0, 2, 2, 1, 7, 11], [5, 4], [(i * 7) % 12 for i in range(21)]]
HEAD = HeadRecipe(
    vocab=12,
    draft_vocab=9,
    num_layers=2,
    own_embedding=True,
    settings={"norm_before_residual": True, "mask_token_id": MASK},
)
WINDOWED = HEAD.changed(
    layer={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
)


def mask_state(head):
    size = len(head.layers) * head.target_hidden
    return torch.randn(1, 1, size, generator=torch.Generator().manual_seed(7))


def folder_of(models, head, layout="speculators"):
    """The folder of a head, written once."""
    folder = models._root / f"parallel-{abs(hash(repr((head, layout))))}"
    if not folder.is_dir():
        peagle = {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]}
        changes = peagle if layout == "speculators" else {}
        head.save(folder, layout, changes=changes, tensors={"mask_hidden": mask_state(head)})
    return str(folder)


def params(count, **changes):
    defaults = {"max_tokens": 24, "temperature": 1.0}
    return [SamplingParams(**{**defaults, "seed": seed, **changes}) for seed in range(count)]


@torch.no_grad()
def published_logits(target, recipe, text, num_drafted):
    """``[drafted, draft_vocab]`` of one pass: the newest token, and mask tokens after it."""
    weights = recipe.tensors()
    every = target_states(target, text[:-1])
    states = torch.stack([every[layer] for layer in recipe.layers], dim=1)
    masks = mask_state(recipe).view(1, len(recipe.layers), -1).expand(num_drafted - 1, -1, -1)
    g = projected(weights, recipe, torch.cat((states, masks)))
    tokens = [*text[1:], *[MASK] * (num_drafted - 1)]
    out = head_layers(weights, recipe, weights["embed_tokens.weight"][tokens], g)[-num_drafted:]
    return rms_norm(out, weights["norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("head", [HEAD, WINDOWED], ids=["all-tokens", "windows"])
def test_drafts_follow_the_equations(models, head):
    """In batches, with prompts in chunks and stored prefixes, after every acceptance."""
    said = []
    for layout in LAYOUTS:
        engine = engine_with_head(
            models,
            TARGET.draft(0.0, context=128),
            folder=folder_of(models, head, layout),
            num_speculative_tokens=5,
            max_chunk_tokens=9,
            proposals="sampled",
        )
        drafts = recorded_drafts(engine)
        for _ in range(2):
            outputs = generate(engine, [*PROMPTS, [3] * 90], params(len(PROMPTS) + 1))
            assert sum(each.speculation.num_accepted for each in outputs)
            said.append(token_ids(outputs))
        reference = models.reference(TARGET.draft(0.0, context=128))
        for drafted in drafts:
            logits = published_logits(reference, head, drafted.text, len(drafted.tokens))
            got = drafted.q[:, head.target_ids()].log()
            assert torch.allclose(got, logits.log_softmax(dim=-1), atol=1e-4)
        assert max(len(each.tokens) for each in drafts) == 5
    assert all(texts == said[0] for texts in said)


@pytest.mark.slow
def test_greedy_texts_are_the_target_s(models):
    greedy = params(len(PROMPTS), temperature=0.0, max_tokens=30)
    folder = folder_of(models, HEAD)
    plain = engine_with_head(models, folder=folder, policy="none")
    expected = token_ids(generate(plain, PROMPTS, greedy))
    for settings in [
        {"policy": "fixed", "num_speculative_tokens": 7},
        {"policy": "svip", "max_batch_size": 1},
        {"policy": "adaptive"},
        {"drafts": ("suffix",)},
    ]:
        engine = engine_with_head(models, folder=folder, **settings)
        assert token_ids(generate(engine, PROMPTS, greedy)) == expected, settings


def test_texts_up_to_the_end_of_the_context(models):
    target, folder = TARGET.draft(0.0, context=32), folder_of(models, HEAD)
    prompts, greedy = [[1] * 20, [2] * 27, [3, 4]], params(3, temperature=0.0, max_tokens=40)
    plain = engine_with_head(models, target, folder=folder, policy="none")
    engine = engine_with_head(models, target, folder=folder, num_speculative_tokens=6)
    outputs = generate(engine, prompts, greedy)
    assert token_ids(outputs) == token_ids(generate(plain, prompts, greedy))
    assert all(each.speculation.num_drafted for each in outputs)


def test_one_hot_proposals_by_default(models):
    """A seed gives the same text with and without drafts."""
    folder = folder_of(models, HEAD)
    plain = engine_with_head(models, folder=folder, policy="none")
    expected = token_ids(generate(plain, PROMPTS, params(4)))
    for proposals, is_same in [(None, True), ("sampled", False)]:
        engine = engine_with_head(models, folder=folder, proposals=proposals)
        assert (token_ids(generate(engine, PROMPTS, params(4))) == expected) == is_same


def test_files(models, tmp_path):
    for layout in LAYOUTS:
        config, weights = read_head(folder_of(models, HEAD, layout))
        assert config.kind is HeadKind.PEAGLE
        assert config.mask_token_id == MASK
        assert weights.tensors["mask_hidden"].shape == (1, 1, 48)
        check_head_kind(folder_of(models, HEAD, layout), "eagle3")
    tensors = {"mask_hidden": mask_state(HEAD)}
    for number, (changes, more, message) in enumerate(
        [
            ({"mask_token_id": 12}, tensors, "mask_token_id .* must be one of 12 tokens, got 12"),
            ({"mask_token_id": None}, tensors, "config.json of the head has no mask_token_id"),
            ({}, {}, "such as mask_hidden"),
            ({}, {"mask_hidden": torch.zeros(1, 1, 16)}, r"mask_hidden .* shape \[1, 1, 16\]"),
            ({"speculators_model_type": "eagle3", "mask_token_id": None}, tensors, "has a tensor"),
        ]
    ):
        changes = {"speculators_model_type": "peagle", **changes}
        folder = HEAD.save(tmp_path / str(number), changes=changes, tensors=more)
        error_of(read_head, folder, error=UnsupportedModelError, match=message)
