"""Folders that contain no model, or not yet: adapters of PEFT, and pointers of Git LFS."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError

from draftwise import LLM
from draftwise.checkpoints import adapters, source
from draftwise.checkpoints.exits.files import ExitConfig, read_exit, write_exit
from draftwise.checkpoints.lfs import refuse_lfs_pointer
from draftwise.distillation.start import read_start
from draftwise.errors import DraftwiseError, ModelNotFoundError, UnsupportedModelError
from draftwise.models import loading
from draftwise.models.heads.loading import find_named_head

from ..refusals import error_of
from ..tiny_eagle_heads import EagleRecipe
from ..tiny_models import Recipe
from .loading_tools import load, refused

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n"
)
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "someone/base", "r": 8}


def with_model(models, role, folder):
    """Load a target, with a folder in one of the roles."""
    names = {each: models.folder(Recipe(vocab=32)) for each in ("target", "draft", "companion")}
    names[role] = str(folder)
    target = names.pop("target")
    return LLM(target, names, dtype="float32")


class TestAdapters:
    @pytest.fixture
    def adapter(self, tmp_path):
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
        (folder / "adapter_model.safetensors").write_bytes(b"")
        return folder

    def test_an_adapter_is_refused_with_the_remedy(self, models, adapter):
        for role in ["target", "draft", "companion"]:
            caught = error_of(with_model, models, role, adapter, error=UnsupportedModelError)
            assert caught.field == role
            assert "is a LORA adapter of 'someone/base' (PEFT)" in caught.message
            assert "PeftModel.merge_and_unload" in caught.message

    def test_an_adapter_with_a_damaged_configuration(self, adapter):
        for content in ["", "[1]", "{}", '{"peft_type": 3}']:
            (adapter / "adapter_config.json").write_text(content)
            assert "is a adapter" not in refused(adapter).message, content
            assert "is an adapter (PEFT)" in refused(adapter).message, content

    def test_an_adapter_beside_a_model(self, llama):
        """Whether transformers adds it depends on whether PEFT is installed."""
        (llama / "adapter_config.json").write_text(json.dumps(ADAPTER))
        assert "contains a model and an adapter" in refused(llama).message
        assert "remove adapter_config.json" in refused(llama).message

    def test_an_adapter_of_the_hub(self, monkeypatch, adapter):
        def download(name, file):
            if name != "someone/adapter":
                raise EntryNotFoundError(file)
            return str(adapter / file)

        def no_config(name, **_):
            raise OSError(f"{name} does not appear to have a file named config.json")

        monkeypatch.setattr(source, "find_on_hub", lambda name, role: name)
        monkeypatch.setattr(adapters, "hf_hub_download", download)
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", no_config)
        assert "is a LORA adapter of 'someone/base'" in refused("someone/adapter").message
        assert "config.json" in refused("someone/empty", ModelNotFoundError).message


class TestPointers:
    def test_pointers_in_place_of_a_models_files(self, models, tmp_path):
        for role in ["target", "draft", "companion"]:
            for file in ["model.safetensors", "tokenizer.json", "config.json"]:
                recipe = Recipe(vocab=32, tokenizer=True)
                folder = Path(shutil.copytree(models.folder(recipe), tmp_path / role / file))
                (folder / file).write_text(POINTER)
                caught = error_of(with_model, models, role, folder, error=ModelNotFoundError)
                assert caught.field == role
                assert f"{str(folder / file)!r} is a pointer of Git LFS" in caught.message
                assert "git lfs pull" in caught.message

    def test_a_pointer_among_several_files_of_weights(self, llama):
        (llama / "model.safetensors").rename(llama / "model-1.safetensors")
        (llama / "model-2.safetensors").write_text(POINTER)
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (llama / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "model-2.safetensors" in refused(llama, ModelNotFoundError).message

    def test_pointers_in_place_of_files_that_are_not_read(self, llama):
        for name in ("consolidated.safetensors", "pytorch_model.bin", "picture.png"):
            (llama / name).write_text(POINTER)
        assert load(llama).model.vocab_size == 32

    def test_pointers_in_place_of_a_heads_weights(self, tmp_path):
        for pickled in [False, True]:
            for kind in ["eagle", "eagle3"]:
                name = {"eagle": "EagleLlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}[kind]
                here = tmp_path / kind / str(pickled)
                folder = EagleRecipe().save(
                    here, pickled=pickled, changes={"architectures": [name]}
                )
                file = here / ("pytorch_model.bin" if pickled else "model.safetensors")
                file.write_text(POINTER)
                error_of(
                    find_named_head,
                    folder,
                    error=ModelNotFoundError,
                    match="is a pointer of Git LFS",
                )
                error_of(read_start, folder, match=r"start_from: .*is a pointer of Git LFS")

    def test_a_pointer_in_place_of_an_exits_weights(self, tmp_path):
        write_exit(tmp_path, ExitConfig(1, 2, 16, 4, 1e-5), {"norm.weight": torch.ones(16)})
        (tmp_path / "model.safetensors").write_text(POINTER)
        with pytest.raises(ModelNotFoundError, match="is a pointer of Git LFS"):
            read_exit(tmp_path, "companion")

    def test_other_files_are_none(self, tmp_path):
        for content in (b"", b"GGUF", b"version 1.0", POINTER.encode()[1:]):
            (tmp_path / "file").write_bytes(content)
            refuse_lfs_pointer(tmp_path / "file", "target")
        refuse_lfs_pointer(tmp_path / "missing", "target")
        (tmp_path / "file").write_text(POINTER)
        with pytest.raises(DraftwiseError, match=r"target: .*file' is a pointer"):
            refuse_lfs_pointer(tmp_path / "file", "target")
