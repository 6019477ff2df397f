"""Layers with experts in the native kernels, compared with transformers' modules."""

import copy

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn

from draftwise.kernels.native import suitability
from draftwise.kernels.native.library import native_library
from draftwise.models import loading
from draftwise.models.loading import load_model
from draftwise.models.packed_modules import has_packed_modules
from draftwise.models.pretrained import PretrainedModel
from draftwise.models.segment import Segment
from draftwise.models.structure import relative_errors

from .gguf_files import CASES, make
from .passes import SIZES, assert_same_with_any_threads, logits_of, random_model

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

CPU = torch.device("cpu")
CONTEXT = 64
# Two of three layers of Qwen have experts. The scores of Glm4Moe are corrected and scaled.
FAMILIES = {
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "Olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
    "Olmoe, normalised": {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "Qwen2Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "Qwen3Moe": {
        "head_dim": 12,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "GptOss": {
        "head_dim": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Glm4Moe": {
        "head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
    },
}
ARCHITECTURES = {family.partition(",")[0] for family in FAMILIES}


def build(family, **settings):
    settings = {"max_position_embeddings": CONTEXT, **FAMILIES[family], **settings}
    model = random_model(family, **settings)
    generator = torch.Generator().manual_seed(4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(generator=generator)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    own = build(family)
    expected_of = copy.deepcopy(own)
    model = PretrainedModel(own, "target", CONTEXT)
    assert model.native is not None
    assert model.slow_path is None
    ids = torch.randint(0, SIZES["vocab_size"], (23,))
    expected = expected_of(ids.unsqueeze(0)).logits[0]
    # As Mixtral's modules choose with rounded products, one position may choose another expert.
    assert relative_errors(logits_of(model, ids), expected).max().item() < 1e-5
    assert relative_errors(logits_of(model, ids, [9, 1, 1, 12]), expected).max().item() < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Qwen2Moe", "Glm4Moe", "GptOss"])
def test_a_row_does_not_depend_on_the_other_rows(family, dtype):
    model = PretrainedModel(build(family).to(dtype), "target", CONTEXT)
    assert model.native is not None
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, SIZES["vocab_size"], (21,), generator=generator)
    alone = logits_of(model, ids, [1] * 21)
    cache = model.new_cache(3, CONTEXT)
    others = torch.randint(0, SIZES["vocab_size"], (30,), generator=generator)
    segments = [Segment(0, 0, 11), Segment(1, 0, 21), Segment(2, 0, 19)]
    tokens = torch.cat([others[:11], ids, others[11:]])
    together = model.forward(cache, tokens, segments, range(11, 32)).float()
    assert torch.equal(alone, together)


@torch.inference_mode()
def test_threads_do_not_change_results():
    model = PretrainedModel(build("Qwen2Moe"), "target", CONTEXT)
    ids = torch.randint(0, SIZES["vocab_size"], (40,))
    assert_same_with_any_threads(lambda: logits_of(model, ids), repeats=5)


def test_weights_exist_once():
    own = build("Qwen3Moe")
    model = PretrainedModel(own, "target", CONTEXT)
    for module in own.modules():
        if isinstance(module, nn.Linear) or hasattr(module, "down_proj"):
            assert all(each.is_meta for each in module.parameters(recurse=False))
    assert model.native is not None


@pytest.mark.parametrize("settings", [{"n_group": 4, "topk_group": 2}], ids=["experts in groups"])
def test_other_ways_to_choose_run_in_modules(settings):
    model = PretrainedModel(build("Glm4Moe", **settings), "target", CONTEXT)
    assert model.native is None
    assert "in groups" in model.slow_path.reason


@torch.inference_mode()
@pytest.mark.parametrize(
    "name",
    [
        "qwen2moe",
        "qwen3moe",
        "qwen3moe, expert_weights_norm false",
        "qwen3moe, tied",
        "llama, experts",
        "gpt-oss",
        "olmoe",
        "glm4moe",
        "glm4moe, head norms",
        "granitehybrid, experts",
    ],
)
def test_blocks_of_a_file(name, tmp_path, monkeypatch):
    for module in (loading, suitability):
        monkeypatch.setattr(module, "is_large", lambda model: True)
    ids = torch.randint(0, 200, (14,), generator=torch.Generator().manual_seed(2))
    file = make(CASES[name], tmp_path / "case.gguf", Type.Q8_0)
    expected = logits_of(load_model(str(file), "target", torch.float32, CPU).model, ids)
    model = load_model(str(file), "target", torch.bfloat16, CPU).model
    assert model.native is not None
    assert not has_packed_modules(model.module)
    assert relative_errors(logits_of(model, ids), expected).median().item() < 0.1
