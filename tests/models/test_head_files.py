"""Folders of drafting heads, in both layouts, are read as they come; wrong ones are refused."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from draftwise.checkpoints.heads import (
    HeadKind,
    HeadLayout,
    find_head,
    parse_head_config,
    read_head,
)
from draftwise.checkpoints.heads.parsing import is_head_config
from draftwise.errors import ModelNotFoundError, UnsupportedModelError

from ..refusals import error_of
from ..tiny_heads import LAYOUTS, HeadRecipe
from ..tiny_models import Recipe

HEAD = HeadRecipe(draft_vocab=6, settings={"norm_before_residual": True})


def test_both_layouts_give_the_same_head(tmp_path):
    for layout in LAYOUTS:
        for pickled in [False, True]:
            folder = HEAD.save(tmp_path / str(pickled), layout, pickled=pickled)
            assert find_head(folder) == Path(folder), layout
            config, weights = read_head(folder)
            assert config.layout == HeadLayout(layout)
            assert config.state_layers == (0, 1, 2), layout
            assert config.norm_before_residual, layout
            assert (config.draft_vocab_size, config.target_vocab_size) == (6, 8), layout
            assert (config.num_heads, config.num_kv_heads, config.head_size) == (4, 2, 6), layout
            assert weights.target_ids.tolist() == HEAD.target_ids().tolist(), layout
            expected = {k: v for k, v in HEAD.tensors().items() if k not in ("d2t", "t2d")}
            assert weights.tensors.keys() == expected.keys(), layout
            assert all(torch.equal(weights.tensors[name], each) for name, each in expected.items())


def test_both_conventions_of_layer_ids():
    for ids, layers in [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        # The output of layer k is the input of layer k + 1.
        ({"target_layer_ids": [1, 3, 4]}, (2, 4, 5)),
        # L = 8: 2, L // 2 and L - 3.
        ({}, (2, 4, 5)),
    ]:
        config = HEAD.changed(layers=None).config("safeailab") | ids
        assert parse_head_config(config).states_of(8) == layers, ids


def test_optional_settings_are_read(tmp_path):
    head = HEAD.changed(
        target_hidden=12,
        hidden=16,
        layers=(0, 1, 3, 4, 5),
        settings={"norm_before_fc": True, "fc_norm": True, "norm_output": True},
        qwen=True,
        num_layers=2,
        own_embedding=True,
        layer={
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
        },
    )
    config, weights = read_head(head.save(tmp_path))
    assert config.norm_before_fc
    assert config.fc_norm
    assert config.norm_output
    assert not config.norm_before_residual
    assert (config.num_states, config.target_hidden_size) == (5, 12)
    assert config.windows == (5, None)
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    assert {
        "embed_tokens.weight",
        "input_norm.weight",
        "fc_norm.4.weight",
    } <= weights.tensors.keys()


def test_the_configuration_may_count_the_targets_layers(tmp_path):
    for layout in LAYOUTS:
        folder = HEAD.save(tmp_path, layout)
        config = json.loads((tmp_path / "config.json").read_text())
        config.get("transformer_layer_config", config)["num_hidden_layers"] = 40
        (tmp_path / "config.json").write_text(json.dumps(config))
        config, _ = read_head(folder)
        assert config.num_layers == 1, layout
        config.check_target(16, 8, 40)
        # The authors' names have no second layer, so the file is complete with any target.
        if layout == "safeailab":
            config.check_target(16, 8, 7)
        else:
            error_of(
                config.check_target,
                16,
                8,
                7,
                error=UnsupportedModelError,
                match="those of 1, and the target has 7",
            )


def test_heads_are_recognised_by_their_tensors(tmp_path):
    """The configuration is the target's, and names no head."""
    head = HEAD.changed(draft_vocab=8, layers=None)
    changes = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}
    folder = head.save(tmp_path, "safeailab", changes={**changes, "draft_vocab_size": None})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_head(folder) == tmp_path
    assert read_head(folder)[0].kind is HeadKind.EAGLE3


def test_older_keys_of_position_scaling():
    scaling = {"type": "linear", "factor": 4.0}
    config = parse_head_config(
        HEAD.config("safeailab") | {"rope_scaling": scaling, "rope_theta": 7.0}
    )
    assert config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 7.0}


def test_other_folders_are_no_heads(tmp_path, models):
    assert find_head(models.folder(Recipe())) is None
    assert find_head(str(tmp_path)) is None


def test_wrong_layers_are_refused():
    for changes, message in [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6, must be a multiple of"),
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "2, must be a multiple of"),
        ({"layer_types": 1}, "layer_types in config.json of the head must be a list"),
        ({"rope_scaling": "linear"}, "rope_scaling in config.json of the head must be an object"),
    ]:
        error_of(
            parse_head_config,
            HEAD.config("safeailab") | {"rope_parameters": None} | changes,
            error=UnsupportedModelError,
            match=message,
        )


def test_malformed_architectures_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"architectures in .* must be a list"):
        is_head_config({"architectures": 5})


def test_states_without_layer_ids_are_refused():
    """By default a head reads three states of the target."""
    config = HEAD.config("safeailab") | {"num_aux_hidden_states": 4}
    for name in ("eagle_aux_hidden_state_layer_ids", "eagle_config"):
        config.pop(name, None)
    with pytest.raises(UnsupportedModelError, match="reads 4 hidden states"):
        parse_head_config(config).states_of(8)


def test_other_targets_are_refused(tmp_path):
    for sizes, message in [
        ((32, 8, 4), "a hidden size of 16, and the target has 32"),
        ((16, 9, 4), "a vocabulary of 8, and the target has 9"),
        ((16, 8, 1), "the target has 1 layers"),
    ]:
        config, _ = read_head(HEAD.save(tmp_path))
        config.check_target(16, 8, 2)
        error_of(config.check_target, *sizes, error=UnsupportedModelError, match=message)


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("loaded",)


def test_pickles_with_more_than_tensors_are_refused(tmp_path, capsys):
    folder = HEAD.save(tmp_path / "code", pickled=True)
    with open(f"{folder}/pytorch_model.bin", "wb") as file:
        pickle.dump({"fc.weight": Harmful()}, file, protocol=2)
    with pytest.raises(UnsupportedModelError, match="more than tensors"):
        read_head(folder)
    assert "loaded" not in capsys.readouterr().out
    torch.save({"fc.weight": "text"}, f"{folder}/pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="more than tensors"):
        read_head(folder)


def test_damaged_files_are_refused(tmp_path):
    folder = HEAD.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a file")
    with pytest.raises(UnsupportedModelError, match=r"model.safetensors' is damaged"):
        read_head(folder)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="has no weights"):
        read_head(folder)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK not a file")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model.bin'"):
        read_head(folder)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    assert find_head(folder) is None
    with pytest.raises(UnsupportedModelError, match="is not a JSON object"):
        read_head(folder)
