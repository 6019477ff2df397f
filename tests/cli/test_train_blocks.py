"""``draftwise train dflash`` and ``dspark`` as a user runs them, on a tiny target."""

import json

import pytest
import torch
from safetensors.torch import load_file

from draftwise.checkpoints.heads import read_head

from .training import TARGET, assert_drafts

SMALL = ("--block-size=6", "--anchors=8", "--draft-vocab=16", "--layers=1,2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own"), [("dflash", ("--num-layers=1",)), ("dspark", ("--rank=8", "--markov=gated"))]
)
def test_a_head_is_written_that_drafts_on_the_target(train, models, tmp_path, kind, own):
    status, out, err = train("--tokens=400", "--dtype=float32", *SMALL, *own, kind=kind)
    folder = tmp_path / "head"
    assert (status, err) == (0, "")
    assert "accepted length" in out
    assert "reads the hidden states 1, 2" in out
    config = json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == kind
    assert config["aux_hidden_state_layer_ids"] == [1, 2]
    assert config["sample_from_anchor"] == (kind == "dspark")
    assert (config["draft_vocab_size"], layer["vocab_size"]) == (16, 40)
    assert layer["model_type"] == "qwen3"
    proposed = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    head, weights = read_head(folder)
    assert proposed == head.num_drafted == (6 if kind == "dspark" else 5)
    assert len(weights.target_ids) == 16
    assert head.num_layers == (2 if kind == "dspark" else 1)
    # The projection is the target's, and is not trained.
    projection = load_file(f"{models.folder(TARGET)}/model.safetensors")["lm_head.weight"]
    stored = weights.tensors["lm_head.weight"]
    assert torch.equal(stored, projection[weights.target_ids].bfloat16())
    training = json.loads((folder / "training.json").read_text())
    assert any(name.startswith("accepted_length/T=") for name in training["evaluation"])
    assert ("confidence_error" in training["evaluation"]) == (kind == "dspark")
    if kind == "dspark":
        assert len(head.confidence_temperatures) == 6
        assert str(head.markov.kind) == "gated"
        assert "Calibration error" in (folder / "README.md").read_text()
    assert "predicts up to" in (folder / "README.md").read_text()
    assert_drafts(models, folder)
    assert_drafts(models, folder, proposals="sampled")


@pytest.mark.slow
def test_a_head_is_trained_in_bfloat16(train, models, tmp_path):
    own = ("--tokens=200", "--dtype=bfloat16", "--rank=8", *SMALL)
    assert train(*own, kind="dspark")[0] == 0
    assert_drafts(models, tmp_path / "head")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--num-layers=6", "--num-layers"),
        ("--block-size=5", "--block-size"),
        ("--layers=1,3", "last layer"),
        ("--loss=best", "tokens"),
        ("--steps=3", "--steps"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(train, option, message):
    status, _, err = train("--tokens=100", option, kind="dflash")
    assert status == 2
    assert message in err
