"""Models that can be loaded, and the typed errors for all others."""

import json

import pytest
import torch
import transformers

from draftwise import LLM, devices
from draftwise.checkpoints import source
from draftwise.devices import resolve_device
from draftwise.errors import (
    DraftwiseError,
    InvalidParameterError,
    ModelNotFoundError,
    VocabularyMismatchError,
    VocabularyWarning,
)
from draftwise.kernels.native.library import native_library
from draftwise.models import loading
from draftwise.models.loading import WeightTypes, load_model, resolve_dtype, weight_types

from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_models import FAMILIES, Recipe, byte_tokenizer, edit_config
from .loading_tools import CPU, load, refused


def test_attributes_of_a_loaded_model(models):
    for family in FAMILIES:
        recipe = Recipe(family, vocab=32)
        loaded = load(models.folder(recipe))
        assert loaded.name == models.folder(recipe), family
        assert loaded.max_model_len == recipe.context, family
        assert loaded.model.vocab_size == 32, family
        assert loaded.model.dtype == torch.float32, family
        assert loaded.num_parameters == sum(
            p.numel() for p in models.reference(recipe).parameters()
        )
        assert loaded.tokenizer is None, family
        assert loaded.eos_token_ids == frozenset(), family
        assert len(loaded.model.layers) == models.reference(recipe).config.num_hidden_layers


def test_a_tokenizer_is_loaded_if_present(llama):
    assert load(llama).tokenizer.get_vocab() == byte_tokenizer().get_vocab()


def test_end_of_sequence_tokens(llama):
    for eos, expected in [(3, {3}), ([3, 5], {3, 5})]:
        edit_config(llama, eos_token_id=7)
        (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        tokenizer = llama / "tokenizer_config.json"
        settings = json.loads(tokenizer.read_text()) | {"eos_token": "\n"}
        tokenizer.write_text(json.dumps(settings))
        own = load(llama).tokenizer.eos_token_id
        assert load(llama).eos_token_ids == expected | {7, own}, eos
        (llama / "generation_config.json").unlink()
        assert load(llama).eos_token_ids == {7, own}, eos


def test_weights_are_converted_to_the_dtype(models):
    for dtype in [torch.bfloat16, torch.float16]:
        loaded = load_model(models.folder(Recipe()), "target", dtype, CPU)
        assert loaded.model.dtype == dtype


class TestNotFound:
    def test_a_folder_that_does_not_exist(self):
        for name in ["/no/such/folder", "./nothing/here", "~/nobody", "a/b/c"]:
            error = refused(name, ModelNotFoundError, role="draft")
            assert error.field == "draft", name
            assert f"there is no folder {name!r}" in error.message

    def test_a_folder_without_a_config(self, tmp_path):
        error = refused(tmp_path, ModelNotFoundError)
        assert error.field == "target"
        assert "has no config.json" in error.message

    def test_pickled_weights_are_refused(self, llama):
        """Unpickling could run code."""
        weights = models_weights(llama)
        torch.save(weights, llama / "pytorch_model.bin")
        (llama / "model.safetensors").unlink()
        error = refused(llama, ModelNotFoundError)
        assert error.field == "target"
        assert "safetensors" in error.message

    def test_a_folder_without_weights(self, llama):
        (llama / "model.safetensors").unlink()
        assert "safetensors" in refused(llama, ModelNotFoundError).message

    def test_a_hub_id_that_cannot_be_loaded(self, monkeypatch):
        monkeypatch.setattr(source, "find_on_hub", lambda name, role: name)

        def offline(name, **_):
            raise OSError(f"We couldn't connect to load {name}")

        monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
        error = refused("someone/something", ModelNotFoundError)
        assert "'someone/something'" in error.message
        assert "couldn't connect" in error.message

    def test_a_bundled_model_that_does_not_exist(self):
        error = refused("zoo:giant", DraftwiseError, role="draft")
        assert isinstance(error, ModelNotFoundError)
        assert "giant" in error.message


def models_weights(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.state_dict()


class TestDamaged:
    def test_damaged_config(self, llama):
        for content in ["", "{", "[1]", '"text"', "{}", '{"model_type": "nope"}']:
            (llama / "config.json").write_text(content)
            assert refused(llama, DraftwiseError).field == "target", content

    def test_damaged_weights(self, llama):
        (llama / "model.safetensors").write_bytes(b"not safetensors")
        assert refused(llama, DraftwiseError).field == "target"

    def test_damaged_tokenizer(self, llama):
        for content in ["", "{", "{}", "[]"]:
            (llama / "tokenizer.json").write_text(content)
            assert refused(llama, DraftwiseError).field == "target", content

    def test_weights_with_another_shape(self, llama):
        edit_config(llama, intermediate_size=40)
        assert refused(llama, DraftwiseError).field == "target"

    def test_missing_weights(self, llama):
        """Otherwise a part of the model would have random weights."""
        edit_config(llama, num_hidden_layers=3)
        error = refused(llama)
        assert error.field == "target"
        assert "9 are missing, such as model.layers.2.input_layernorm.weight" in error.message

    def test_weights_without_a_language_model_head(self, tmp_path):
        transformers.LlamaModel(Recipe().build().config).save_pretrained(tmp_path)
        error = refused(tmp_path)
        assert "1 are missing, such as lm_head.weight" in error.message


class TestVocabularies:
    def build(self, models, target, draft):
        folders = models.folder(target), models.folder(draft)
        with pytest.raises(VocabularyMismatchError) as caught:
            LLM(folders[0], unguarded(folders[1], policy="fixed"), dtype="float32")
        assert caught.value.field == "draft"
        for folder in folders:
            assert repr(folder) in caught.value.message
        return caught.value.message

    def test_different_widths_without_tokenizers_are_refused(self, models):
        message = self.build(models, Recipe(vocab=8), Recipe(vocab=16))
        assert "8" in message
        assert "16 tokens" in message

    def test_different_widths_with_one_tokenizer_are_refused(self, models):
        self.build(models, Recipe(vocab=32, tokenizer=True), Recipe(vocab=48))

    def test_different_tokens_are_translated(self, models, llama):
        vocab = json.loads((llama / "tokenizer.json").read_text())
        tokens = vocab["model"]["vocab"]
        tokens["g"], tokens["h"] = tokens["h"], tokens["g"]
        (llama / "tokenizer.json").write_text(json.dumps(vocab))
        target = models.folder(Recipe(vocab=32, tokenizer=True))
        with pytest.warns(VocabularyWarning, match="30 of its 32 tokens are shared"):
            llm = LLM(target, unguarded(str(llama), policy="fixed"), dtype="float32")
        assert llm.draft.translator.token(tokens["h"]) == (tokens["g"],)


class TestDeviceAndDtype:
    def test_supported_dtypes(self):
        assert resolve_dtype("float16", CPU) is torch.float16
        assert resolve_dtype("auto", CPU) in (torch.bfloat16, torch.float32)
        assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16

    @pytest.mark.parametrize("lacks", [False, True])
    def test_types_where_pytorch_emulates_bfloat16(self, monkeypatch, lacks):
        """The native kernels read it fast if they run at all."""
        monkeypatch.setattr(devices, "has_fast_bfloat16", lambda device: False)
        monkeypatch.setattr(loading, "library_for", lambda device: object())
        monkeypatch.setattr(loading, "lacks_instructions", lambda: lacks)
        native = torch.float32 if lacks else torch.bfloat16
        assert weight_types("auto", CPU) == WeightTypes(native, torch.float32)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert weight_types(dtype, CPU) == WeightTypes(dtype, dtype)
        monkeypatch.setattr(loading, "library_for", lambda device: None)
        assert weight_types("auto", CPU) == WeightTypes(torch.float32, torch.float32)

    @pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")
    @pytest.mark.parametrize(
        ("recipe", "dtype"),
        [
            (Recipe("llama", 32), torch.bfloat16),
            (Recipe("llama", 32, config={"hidden_act": "gelu"}), torch.float32),
            (Recipe("gpt2", 32), torch.float32),
        ],
        ids=["native", "written out", "modules"],
    )
    def test_what_computes_a_model_decides_its_type(self, models, recipe, dtype):
        types = WeightTypes(torch.bfloat16, torch.float32)
        model = load_model(models.folder(recipe), "target", types, CPU).model
        assert model.dtype == dtype
        assert (model.native is not None) == (dtype == torch.bfloat16)
        plain = load_model(models.folder(recipe), "target", dtype, CPU).model
        # No weight went through bfloat16 on its way to float32.
        assert torch.equal(model.embedding, plain.embedding)

    def test_unknown_dtypes_are_refused(self):
        for dtype in ["int8", "", "float64", "BFLOAT16"]:
            caught = error_of(resolve_dtype, dtype, CPU, error=InvalidParameterError)
            assert caught.field == "dtype"
            assert "bfloat16" in caught.message

    def test_supported_devices(self):
        assert resolve_device("cpu") == CPU
        assert resolve_device("auto").type in ("cpu", "cuda")

    def test_unavailable_devices_are_refused(self):
        for device in ["gpu", "", "cuda:99", "meta:x"]:
            caught = error_of(resolve_device, device, error=InvalidParameterError)
            assert caught.field == "device"
