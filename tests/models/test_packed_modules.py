"""Models that transformers' modules compute with the blocks of a GGUF file."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn

from draftwise.kernels.native import packed as native_packed
from draftwise.kernels.native import suitability
from draftwise.kernels.native.library import native_library
from draftwise.models import loading
from draftwise.models.loading import load_model
from draftwise.models.packed_modules import has_packed_modules
from draftwise.models.segment import Segment
from draftwise.models.structure import relative_errors

from .gguf_files import CASES, make

pytestmark = pytest.mark.skipif(
    native_library() is None, reason="this machine has no native kernels"
)

CPU = torch.device("cpu")
IDS = torch.randint(0, 200, (14,), generator=torch.Generator().manual_seed(2))
# With experts; dense, in two ways; with recurrent layers, of which one matrix has no blocks.
NAMES = {
    "gemma4, experts": (),
    "glm4": (),
    "deepseek2": (),
    "nemotron_h": (),
    "nemotron_h_moe": (),
    "granitemoe, shared": (),
    "lfm2moe": (),
    "minimax-m2": (),
    "ernie4_5-moe": (),
    "nemotron": (),
    "qwen35": ("blk.0.ssm_alpha.weight",),
    "qwen35moe": ("blk.0.ssm_alpha.weight",),
}


def logits(model, ids, rows=None):
    cache = model.new_cache(1, len(ids))
    rows = range(len(ids)) if rows is None else rows
    with torch.inference_mode():
        return model.forward(cache, ids, [Segment(0, 0, len(ids))], rows).float()


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Load a case's file with blocks, in modules that compute with them and expanded."""

    def load(name, dtype, blocks=Type.Q8_0, without_blocks=()):
        file = make(CASES[name], tmp_path / "case.gguf", blocks, without_blocks)
        for module in (loading, suitability):
            monkeypatch.setattr(module, "is_large", lambda model: True)
        return load_model(str(file), "target", dtype, CPU)

    return load


@pytest.mark.parametrize("name", NAMES)
def test_computes_what_the_expanded_weights_compute(packed, name):
    expected = logits(packed(name, torch.float32).model, IDS)
    loaded = packed(name, torch.bfloat16, without_blocks=NAMES[name])
    assert has_packed_modules(loaded.model._model)
    assert relative_errors(logits(loaded.model, IDS), expected).median().item() < 0.1


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.1.attn_k.weight"])
def test_one_matrix_without_blocks_does_not_expand_the_others(packed, tensor):
    expected = logits(packed("llama", torch.float32, without_blocks=[tensor]).model, IDS)
    loaded = packed("llama", torch.bfloat16, without_blocks=[tensor])
    linear = [each for each in loaded.model._model.modules() if isinstance(each, nn.Linear)]
    assert sum(each.weight.is_meta for each in linear) == len(linear) - tensor.startswith("blk")
    assert relative_errors(logits(loaded.model, IDS), expected).median().item() < 0.1
    part = "embedding" if tensor.startswith("token") else "linear layers"
    assert part in loaded.model.slow_path.reason


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_no_weight_is_expanded(packed, name):
    loaded = packed(name, torch.bfloat16, Type.Q4_0)
    model = loaded.model._model
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert sum(module.weight.is_meta for module in linear) >= 4
    experts = [each for each in model.modules() if hasattr(each, "gate_up_proj")]
    assert experts
    for each in experts:
        assert each.gate_up_proj.is_meta
        assert each.down_proj.is_meta
    assert model.get_input_embeddings().weight.is_meta
    assert loaded.num_parameters == sum(each.numel() for each in model.parameters())


def test_experts_do_not_depend_on_the_other_tokens(packed):
    model = packed("gemma4, experts", torch.bfloat16).model
    experts = next(each for each in model._model.modules() if hasattr(each, "outer"))
    generator = torch.Generator().manual_seed(3)
    hidden = experts.gate_up_proj.shape[2]
    rows = torch.randn(9, hidden, generator=generator)
    chosen = torch.stack(
        [torch.randperm(experts.num_experts, generator=generator)[:2] for _ in range(9)]
    )
    weights = torch.rand(9, 2, generator=generator)
    together = experts(rows, chosen, weights)
    for at in range(9):
        alone = experts(rows[at : at + 1], chosen[at : at + 1], weights[at : at + 1])
        assert torch.equal(alone[0], together[at])


def test_a_type_without_kernels_is_expanded(packed, monkeypatch):
    monkeypatch.delitem(native_packed._FORMATS, "Q5_0")
    loaded = packed("qwen3moe", torch.bfloat16, Type.Q5_0)
    assert not has_packed_modules(loaded.model._model)
