"""Models that do not run on the fast path, and their warnings."""

import warnings

import pytest
import torch
import transformers

from draftwise import LLM
from draftwise.errors import SlowPathWarning
from draftwise.kernels.native import suitability
from draftwise.kernels.native.library import native_library
from draftwise.models import fast_path
from draftwise.models.fast_path import slow_path
from draftwise.models.loading import load_model

from ..stand_ins import unguarded
from ..tiny_models import Recipe

CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")


def load(models, recipe, dtype=torch.float32):
    return load_model(models.folder(recipe), "target", dtype, CPU).model


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_on_the_fast_path_has_no_warning(models, dtype):
    model = load(models, Recipe("llama", 32), dtype)
    assert model.native is not None
    assert model.slow_path is None


@needs_kernel
def test_the_reason_names_the_unsupported_feature(models):
    for recipe, dtype, reason, slowdown in [
        (Recipe("gpt2", 32), torch.float32, "architecture is GPT2LMHeadModel, which", "6"),
        (Recipe("llama", 32), torch.float16, "weights are float16, not bfloat16", "3 to 7"),
        (
            Recipe("llama", 32, config={"hidden_act": "gelu"}),
            torch.bfloat16,
            "activation is gelu",
            "4",
        ),
        (
            Recipe("llama", 32, config={"mlp_bias": True}),
            torch.float32,
            "gate_proj has a bias",
            "4",
        ),
        (
            Recipe(
                "llama",
                32,
                config={
                    "rope_parameters": {
                        "rope_type": "dynamic",
                        "factor": 2.0,
                        "rope_theta": 10000.0,
                    }
                },
            ),
            torch.float32,
            "rotary embedding is dynamic",
            "4",
        ),
    ]:
        model = load(models, recipe, dtype)
        assert model.native is None, recipe
        assert reason in model.slow_path.reason, recipe
        assert model.slow_path.slowdown == slowdown, recipe
        expected = f"expect passes to take about {slowdown} times as long"
        if dtype != torch.float32:
            expected += ", and greedy texts may depend on the other requests of a batch"
        assert str(model.slow_path).endswith(expected), recipe


def test_without_kernels_the_reason_is_the_missing_compiler(models, monkeypatch):
    monkeypatch.setattr(suitability, "native_library", lambda: None)
    monkeypatch.setattr(suitability, "why_unavailable", lambda: "no C++ compiler found")
    model = load(models, Recipe("llama", 32))
    assert model.native is None
    assert model.slow_path.reason == "there are no native kernels: no C++ compiler found"


class TestLargeModels:
    """Large models need the vectors of AVX2, and bfloat16 with a matrix unit."""

    @pytest.fixture(autouse=True)
    def _everything_is_large(self, monkeypatch):
        monkeypatch.setattr(suitability, "_SMALL_MODEL", 0)

    @needs_kernel
    def test_float32_weights(self, models, monkeypatch):
        """With a matrix unit, which the kernels use for bfloat16 only."""
        monkeypatch.setattr(suitability, "_why_slower", lambda *_: None)
        monkeypatch.setattr(fast_path, "lacks_instructions", lambda: False)
        monkeypatch.setattr(native_library(), "multiplies_tiles", True)
        model = load(models, Recipe("llama", 32))
        assert model.native is None
        assert model.slow_path.reason.startswith("its weights are float32, and")
        assert model.slow_path.slowdown == "4"

    @needs_kernel
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_vectors_suffice_without_a_matrix_unit(self, models, monkeypatch, dtype):
        monkeypatch.setattr(suitability, "_missing_instructions", lambda _: None)
        monkeypatch.setattr(native_library(), "multiplies_tiles", False)
        model = load(models, Recipe("llama", 32), dtype)
        assert model.native is not None
        assert model.slow_path is None

    @needs_kernel
    def test_a_processor_without_avx2(self, models, monkeypatch):
        """The loss of speed was not measured for this processor."""
        missing = "a processor with AVX2"
        monkeypatch.setattr(suitability, "_missing_instructions", lambda _: missing)
        library = native_library()
        monkeypatch.setattr(library, "multiplies_tiles", False)
        for dtype in (torch.float32, torch.bfloat16):
            model = load(models, Recipe("llama", 32), dtype)
            assert model.native is None
            assert model.slow_path.reason.endswith(missing)
            assert "what that costs was not measured" in str(model.slow_path)

    @needs_kernel
    def test_sizes_that_are_not_multiples_of_a_tile(self, models, monkeypatch):
        monkeypatch.setattr(native_library(), "multiplies_tiles", True)
        recipe = Recipe("llama", 32, config={"hidden_size": 48})
        model = load(models, recipe, torch.bfloat16)
        assert model.native is None
        assert "sizes that are multiples of 32, and one is 48" in model.slow_path.reason


class _OnCuda(torch.nn.Module):
    """A model that reports a GPU as the device of its weights."""

    config = transformers.LlamaConfig()

    def get_output_embeddings(self):
        return torch.nn.Linear(1, 1, bias=False)

    def parameters(self, recurse=True):
        yield type("Weight", (), {"device": torch.device("cuda"), "dtype": torch.bfloat16})()


def test_on_cuda_other_architectures_are_not_captured():
    assert slow_path(type("LlamaForCausalLM", (_OnCuda,), {})()) is None
    found = slow_path(type("GPT2LMHeadModel", (_OnCuda,), {})())
    assert "GPT2LMHeadModel" in found.reason
    assert found.slowdown == "2 to 5"


def test_a_warning_for_each_model_and_role(models):
    """In Python, too. A model on the fast path has no warning."""
    gpt2, llama = (models.folder(Recipe(family, 32)) for family in ("gpt2", "llama"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LLM(gpt2, unguarded(gpt2, policy="fixed"), dtype="float32").close()
    said = [str(each.message) for each in caught if each.category is SlowPathWarning]
    assert [line.split(":")[0] for line in said] == ["target", "draft"]
    assert all(line.count("does not run on the fast path: its architecture") == 1 for line in said)
    if native_library() is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LLM(llama, dtype="float32").close()
