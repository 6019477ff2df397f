"""Folders of heads of EAGLE-1 and EAGLE-2 are recognised and read; wrong ones are refused."""

import os
from pathlib import Path

import pytest
import torch

from draftwise.checkpoints.heads import (
    HeadKind,
    HeadLayout,
    files,
    find_head,
    parse_head_config,
    read_head,
)
from draftwise.distillation.start import read_start
from draftwise.errors import InvalidParameterError, UnsupportedModelError

from ..refusals import error_of
from ..tiny_eagle_heads import EagleRecipe
from ..tiny_models import Recipe

HEAD = EagleRecipe(own_embedding=True)
SPECULATORS = EagleRecipe("speculators")
NORMED = SPECULATORS.changed(layernorms=True, bias=True)


def test_folders_are_read(tmp_path):
    for head in [HEAD, HEAD.changed(bias=True), HEAD.changed(bias=None), NORMED]:
        for pickled in [False, True]:
            folder = head.save(tmp_path / str(pickled), pickled=pickled)
            assert find_head(folder) == Path(folder), head
            config, weights = read_head(folder)
            assert config.kind is HeadKind.EAGLE, head
            assert config.layout == HeadLayout(head.layout)
            assert config.states_of(7) == (7,), head
            sizes = config.draft_vocab_size, config.target_vocab_size, config.num_layers
            assert sizes == (8, 8, 1), head
            assert config.layernorms is head.layernorms
            assert weights.target_ids.tolist() == list(range(8)), head
            expected = head.tensors()
            assert weights.tensors.keys() == expected.keys(), head
            assert all(torch.equal(weights.tensors[name], each) for name, each in expected.items())


def test_heads_are_recognised_by_their_architecture(tmp_path):
    """Heads of several layers are, too."""
    for name in ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]:
        head = HEAD.changed(num_layers=2, settings={"architectures": [name]})
        folder = head.save(tmp_path)
        assert find_head(folder) == tmp_path, name
        config, weights = read_head(folder)
        assert config.num_layers == 2, name
        assert "layers.1.input_layernorm.weight" in weights.tensors, name
        assert "layers.0.input_layernorm.weight" not in weights.tensors, name


def test_models_of_one_layer_are_no_heads(tmp_path, models):
    one_layer = Recipe(config={"num_hidden_layers": 1})
    assert find_head(models.folder(one_layer)) is None
    folder = HEAD.save(tmp_path, without=("fc.weight",))
    assert find_head(folder) is None
    (tmp_path / "model.safetensors").write_bytes(b"not a file")
    assert find_head(folder) is None
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK not a file")
    assert find_head(folder) is None


def test_repositories_of_the_hub(tmp_path, models, monkeypatch):
    """Weights are downloaded only if the repository may be that of a head."""
    one_layer, two_layers = (
        models.folder(Recipe(tokenizer=True, config={"num_hidden_layers": count}))
        for count in (1, 2)
    )
    copied = HEAD.save(tmp_path / "copied", changes={"num_hidden_layers": 32})
    folders = {
        "a/head": HEAD.save(tmp_path / "head"),
        "a/copied": copied,
        "a/one-layer": one_layer,
        "a/model": two_layers,
        "a/unlisted": copied,
    }
    downloaded = []

    def list_files(name):
        if name == "a/unlisted":
            raise OSError("the hub cannot be reached")
        return os.listdir(folders[name])

    def snapshot(name, allow_patterns):
        downloaded.append(name)
        return folders[name]

    monkeypatch.setattr(files, "find_on_hub", lambda name, role: name)
    monkeypatch.setattr(files, "cached_config", lambda name: None)
    monkeypatch.setattr(files, "hf_hub_download", lambda name, _: f"{folders[name]}/config.json")
    monkeypatch.setattr(files, "snapshot_download", snapshot)
    monkeypatch.setattr(files, "list_repo_files", list_files)
    assert find_head("a/head") == tmp_path / "head"
    assert find_head("a/copied") == tmp_path / "copied"
    assert find_head("a/one-layer") is None
    assert find_head("a/model") is None
    assert find_head("a/unlisted") is None
    assert downloaded == ["a/head", "a/copied", "a/one-layer"]


@pytest.mark.parametrize("pickled", [False, True])
def test_the_configuration_may_be_the_targets(tmp_path, pickled):
    """Then it counts the target's layers, and the tensors decide."""
    target = {"num_hidden_layers": 32, "layer_types": ["full_attention"] * 32}
    folder = HEAD.save(tmp_path, pickled=pickled, changes=target)
    assert find_head(folder) == tmp_path
    config, weights = read_head(folder)
    assert (config.num_layers, config.windows) == (1, (None,))
    assert weights.tensors.keys() == HEAD.tensors().keys()
    config.check_target(16, 8, 32)
    with pytest.raises(UnsupportedModelError) as caught:
        config.check_target(16, 8, 7)
    assert "num_hidden_layers in config.json of the head is 32" in caught.value.message
    assert "its tensors are those of 1, and the target has 7" in caught.value.message


def test_heads_with_more_layers_than_their_configuration_are_refused(tmp_path):
    folder = HEAD.changed(num_layers=2).save(tmp_path, changes={"num_hidden_layers": 1})
    with pytest.raises(UnsupportedModelError, match=r"is 1, and its tensors are those of 2 layers"):
        read_head(folder)


def test_layers_have_no_gaps(tmp_path):
    three = HEAD.changed(num_layers=3)
    middle = [name for name in three.tensors() if "layers.1." in name]
    with pytest.raises(UnsupportedModelError, match=r"are missing, such as layers\.1\."):
        read_head(three.save(tmp_path, without=middle))


def test_a_tensor_with_two_names_is_refused(tmp_path):
    folder = HEAD.save(tmp_path, tensors={"model.fc.weight": torch.zeros(16, 32)})
    with pytest.raises(UnsupportedModelError, match=r"two tensors 'fc\.weight'"):
        read_head(folder)


def test_old_pickles_are_recognised(tmp_path):
    """PyTorch's format before version 1.6, which cannot be mapped."""
    folder = HEAD.save(tmp_path, pickled=True)
    torch.save(HEAD.tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert find_head(folder) == tmp_path
    assert read_head(folder)[1].tensors.keys() == HEAD.tensors().keys()


def test_buffers_of_older_files_are_ignored(tmp_path):
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    _, weights = read_head(HEAD.save(tmp_path, tensors=extra))
    assert weights.tensors.keys() == HEAD.tensors().keys()


def test_other_targets_are_refused():
    for sizes, message in [
        ((32, 8, 4), "a hidden size of 16, and the target has 32"),
        ((16, 9, 4), "a vocabulary of 8, and the target has 9"),
    ]:
        config = parse_head_config(HEAD.config())
        config.check_target(16, 8, 1)
        error_of(config.check_target, *sizes, error=UnsupportedModelError, match=message)


def test_training_continues_heads_of_eagle_3_only(tmp_path):
    with pytest.raises(InvalidParameterError, match="of EAGLE-1 or EAGLE-2, not of EAGLE-3"):
        read_start(HEAD.save(tmp_path))
