"""Drafts of MTP layers are refused, with what the files of the target say of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwise import LLM
from draftwise.checkpoints import mtp, source
from draftwise.errors import ModelNotFoundError, UnsupportedModelError

from ..stand_ins import unguarded
from ..tiny_models import edit_config

REASON = "Draftwise does not run MTP layers yet; use 'suffix', a draft model or an EAGLE-3 head"


def refused(target, speculation=None):
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(str(target), speculation or {"method": "mtp"}, dtype="float32")
    assert caught.value.field == "draft"
    assert REASON in caught.value.message
    return caught.value.message


def add_tensor(folder, name):
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(2)}, file, {"format": "pt"})


def test_all_names_are_refused(llama):
    for speculation in [
        {"draft": "mtp"},
        {"draft": ["suffix", "mtp"]},
        {"draft": "qwen3_next_mtp"},
        {"method": "mtp", "num_speculative_tokens": 2},
        {"method": "deepseek_mtp"},
        {"method": "mtp", "model": "someone/assistant"},
        unguarded("mtp"),
    ]:
        assert f"MTP layers of the target: {str(llama)!r} has none" in refused(llama, speculation)


def test_what_the_target_has(llama, tmp_path):
    for settings, tensor, clause in [
        ({}, "mtp.fc.weight", "has some"),
        ({"num_nextn_predict_layers": 1}, "model.layers.2.eh_proj.weight", "has 1"),
        ({"mtp_num_hidden_layers": 2}, "mtp.layers.0.mlp.up_proj.weight", "has 2"),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, "model.mtp.layers.0.enorm.weight", "has 1"),
        ({"num_nextn_predict_layers": 0}, "other.weight", "has none"),
        ({"num_nextn_predict_layers": 1}, "other.weight", "counts 1, but its files do not contain"),
    ]:
        folder = Path(shutil.copytree(llama, tmp_path / tensor, dirs_exist_ok=True))
        edit_config(folder, **settings)
        add_tensor(folder, tensor)
        assert clause in refused(folder), settings


def test_a_damaged_configuration_counts_none(llama):
    (llama / "config.json").write_text("{")
    assert "has none" in refused(llama)


def test_files_of_the_hub_are_not_downloaded(monkeypatch, tmp_path):
    """Only the configuration is, which counts the layers."""
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 3}))
    monkeypatch.setattr(source, "find_on_hub", lambda name, role: name)
    monkeypatch.setattr(mtp, "hf_hub_download", lambda name, file: str(tmp_path / file))
    assert "the configuration of 'someone/target' counts 3, and Draftwise" in refused(
        "someone/target"
    )

    def offline(name, file):
        raise ConnectionError

    monkeypatch.setattr(mtp, "hf_hub_download", offline)
    assert "it is not known whether 'someone/target' has any" in refused("someone/target")
    assert "it is not known whether 'a.gguf' has any" in refused("a.gguf")


def test_a_target_that_does_not_exist():
    with pytest.raises(ModelNotFoundError, match="target: there is no folder"):
        LLM("/no/such/folder", {"method": "mtp"})


def test_other_settings_on_a_loaded_target(llama):
    llm = LLM(str(llama), {"method": "ngram"}, dtype="float32")
    with pytest.raises(UnsupportedModelError, match="has none, and Draftwise does not run"):
        llm.with_speculation({"method": "mtp"})


def test_a_folder_may_have_the_name(llama, monkeypatch):
    monkeypatch.chdir(llama.parent)
    Path(llama).rename("mtp")
    llm = LLM("./mtp", {"draft": "mtp", "policy": "fixed"}, dtype="float32")
    assert llm.draft is not None
