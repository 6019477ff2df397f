"""Heads of P-EAGLE follow their equations in one pass, and keep the target's texts."""

import pytest
import torch

from draftwise.checkpoints.heads import HeadKind, read_head
from draftwise.errors import UnsupportedModelError
from draftwise.models.heads.loading import check_head_kind

from ..refusals import error_of
from ..tiny_heads import LAYOUTS
from .assembly import generate, sampled, token_ids
from .heads import TARGET, engine_with_head, head_folder, recorded_drafts
from .parallel_heads import HEAD, MASK, WINDOWED, assert_published
from .target_readers import PROMPTS


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("head", [HEAD, WINDOWED], ids=["all-tokens", "windows"])
def test_drafts_follow_the_equations(models, head):
    """In batches, with prompts in chunks and stored prefixes, after every acceptance."""
    said, target = [], TARGET.draft(0.0, context=128)
    for layout in LAYOUTS:
        engine = engine_with_head(
            models,
            target,
            folder=head_folder(models, head, layout),
            num_speculative_tokens=5,
            max_chunk_tokens=9,
            proposals="sampled",
        )
        drafts = recorded_drafts(engine)
        for _ in range(2):
            outputs = generate(engine, [*PROMPTS, [3] * 90], sampled(len(PROMPTS) + 1))
            assert sum(each.speculation.num_accepted for each in outputs)
            said.append(token_ids(outputs))
        assert_published(models, drafts, head, target)
    assert all(texts == said[0] for texts in said)


def test_files(models, tmp_path):
    for layout in LAYOUTS:
        config, weights = read_head(head_folder(models, HEAD, layout))
        assert config.kind is HeadKind.PEAGLE
        assert config.mask_token_id == MASK
        assert weights.tensors["mask_hidden"].shape == (1, 1, 48)
        check_head_kind(head_folder(models, HEAD, layout), "eagle3")
    wrong = {"mask_hidden": torch.zeros(1, 1, 16)}
    for number, (changes, others, message) in enumerate(
        [
            ({"mask_token_id": 12}, {}, "mask_token_id .* must be one of 12 tokens, got 12"),
            ({"mask_token_id": None}, {}, "config.json of the head has no mask_token_id"),
            ({}, {"without": ("mask_hidden",)}, "such as mask_hidden"),
            ({}, {"tensors": wrong}, r"mask_hidden .* shape \[1, 1, 16\]"),
            ({"speculators_model_type": "eagle3", "mask_token_id": None}, {}, "has a tensor"),
        ]
    ):
        folder = HEAD.save(tmp_path / str(number), changes=changes, **others)
        error_of(read_head, folder, error=UnsupportedModelError, match=message)
