"""Folders of assistants of Gemma 4: what is refused, and in which words."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwise import LLM, SamplingParams
from draftwise.checkpoints.heads.files import find_head
from draftwise.errors import InvalidParameterError, UnsupportedModelError

from ..refusals import error_of
from ..stand_ins import unguarded
from ..tiny_assistants import make_assistant
from ..tiny_models import Recipe, edit_config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folders of a target and of an assistant with groups of tokens."""
    return make_assistant("ordered", tmp_path_factory.mktemp("made"))[:2]


@pytest.fixture
def folders(made, tmp_path):
    """The folder of the target, and a copy of the assistant's."""
    return made[0], Path(shutil.copytree(made[1], tmp_path / "assistant"))


def refused(target, assistant, error=UnsupportedModelError, **settings):
    caught = error_of(
        LLM, target, unguarded(str(assistant), **settings), dtype="float32", error=error
    )
    return caught.field, caught.message


def edit_text(folder, **changes):
    text = json.loads((folder / "config.json").read_text())["text_config"] | changes
    edit_config(folder, text_config=text)


def edit_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_a_folder_is_found_by_its_configuration(folders):
    assert find_head(str(folders[1])) == folders[1]
    edit_config(folders[1], architectures=None, model_type="gemma4_unified_assistant")
    assert find_head(str(folders[1])) == folders[1]


def test_a_target_of_another_family_is_refused(models, folders):
    field, message = refused(models.folder(Recipe()), folders[1])
    assert field == "draft"
    assert "the model_type of" in message
    assert "is 'llama'" in message


@pytest.mark.parametrize(
    ("name", "changes", "text", "clause"),
    [
        ("backbone_hidden_size", {"backbone_hidden_size": 24}, {}, "hidden_size of the target is"),
        ("text_config.vocab_size", {}, {"vocab_size": 12}, "vocab_size of the target is 8"),
        ("text_config.sliding_window", {}, {"sliding_window": 4}, "of the target is 8"),
        ("text_config.num_key_value_heads", {}, {"num_key_value_heads": 4}, "of the target it is"),
        ("num_centroids", {"num_centroids": 3}, {}, "no divisor of 8 tokens"),
        ("centroid_intermediate_top_k", {"centroid_intermediate_top_k": 5}, {}, "of 4 centroids"),
        ("quantization_config", {"quantization_config": {"bits": 4}}, {}, "is not supported"),
        ("text_config.enable_moe_block", {}, {"enable_moe_block": True}, "no assistant has it"),
        ("text_config.model_type", {}, {"model_type": "llama"}, "is 'llama'"),
        ("text_config", {"text_config": 5}, {}, "describes no layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_do_not_fit_are_refused_by_name(folders, name, changes, text, clause):
    if text:
        edit_text(folders[1], **text)
    edit_config(folders[1], **changes)
    field, message = refused(*folders)
    assert field == "draft"
    assert repr(name) in message
    assert clause in message


def test_assistants_of_both_kinds_draft_the_same(folders):
    """The layers of Gemma 4 Unified are those of Gemma 4."""
    target, assistant = folders
    outputs = []
    for _ in range(2):
        llm = LLM(target, unguarded(str(assistant), policy="fixed"), dtype="float32")
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=20))
        assert output.speculation.num_drafted
        outputs.append((output.token_ids, output.speculation.num_accepted))
        edit_config(assistant, model_type="gemma4_unified_assistant", architectures=None)
        edit_text(assistant, model_type="gemma4_unified_text")
    assert outputs[0] == outputs[1]


def test_layers_without_their_like_in_the_target_are_refused(made, folders):
    target = Recipe("gemma4_text", 8, 256, config={"layer_types": ["full_attention"] * 4}).build()
    target.save_pretrained(folders[1].parent / "target")
    field, message = refused(folders[1].parent / "target", folders[1])
    assert field == "draft"
    assert "'text_config.layer_types' is 'sliding_attention'" in message


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        (
            lambda tensors: tensors.pop("pre_projection.weight"),
            "'pre_projection.weight' is missing",
        ),
        (lambda tensors: tensors.pop("model.norm.weight"), "tensors are missing: norm.weight"),
        (
            lambda tensors: tensors.update({"model.layers.9.x": torch.zeros(1)}),
            "tensors belong to no layer: layers.9.x",
        ),
        (
            lambda tensors: tensors.update({"post_projection.weight": torch.zeros(2, 2)}),
            "has the shape [2, 2]",
        ),
        (
            lambda tensors: tensors["masked_embedding.token_ordering"].zero_(),
            "does not name each token once",
        ),
    ],
)
def test_damaged_tensors_are_refused(folders, change, clause):
    edit_tensors(folders[1], change)
    field, message = refused(*folders)
    assert field == "draft"
    assert clause in message


def test_other_uses_are_refused(made, models):
    target, assistant = made
    assert refused(target, assistant, method="eagle3")[0] == "draft"
    field, message = refused(target, assistant, InvalidParameterError, tree_width=2)
    assert field == "tree_width"
    field, message = refused(target, target, companion=assistant, policy="sv")
    assert field == "companion"
    assert "of the kind Gemma 4 assistant" in message
    field, message = refused(target, f"{assistant}:int8", InvalidParameterError)
    assert field == "draft"
    caught = error_of(LLM, assistant, dtype="float32", error=UnsupportedModelError)
    assert caught.field == "target"
