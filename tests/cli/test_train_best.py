"""``draftwise train`` with a target in place of a kind."""

import json
import shutil

import pytest

from draftwise.distillation.choice import best_kind

from ..tiny_models import Recipe, edit_config
from ..tiny_mtp import LAYERS
from .training import SMALL, TARGET

HYBRID = Recipe("qwen3_5", vocab=40, context=64, config={"layer_types": LAYERS})


@pytest.fixture
def run(draftwise, tmp_path, prompts):
    """Run the command; returns (exit status, stdout, stderr)."""
    every = [*SMALL, "--prompts", prompts, "-o", tmp_path / "draft", "--answers", tmp_path / "kept"]
    return lambda *arguments: draftwise("train", *arguments, *every, "--dtype=float32")


@pytest.mark.slow
def test_the_kind_is_chosen_by_the_target(run, models, tmp_path):
    status, out, err = run(models.folder(TARGET), "--tokens=100")
    assert (status, err) == (0, "")
    assert "training eagle3: it was ahead" in out
    settings = json.loads((tmp_path / "draft" / "training.json").read_text())["settings"]
    assert (settings["kind"], settings["loss"]) == ("eagle3", "mixed")


def test_the_target_may_be_an_option(run, models, tmp_path):
    assert run("--tokens=100", "--target", models.folder(TARGET))[0] == 0
    assert (tmp_path / "draft" / "config.json").exists()


def test_a_target_with_an_mtp_layer_gets_it_trained(models, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(models.folder(HYBRID), folder)
    assert best_kind(str(folder)).kind == "eagle3"
    edit_config(folder, mtp_num_hidden_layers=1)
    assert best_kind(str(folder)).kind == "mtp"


def test_mistakes(run, models, tmp_path):
    for arguments, message in [
        (["eagle4", "--tokens=100"], "did you mean 'eagle3'"),
        ([tmp_path / "nothing", "--tokens=100"], "nothing"),
        ([models.folder(TARGET), "--target=zoo:draft"], "is named already"),
        ([models.folder(TARGET), "--loss=kl"], "--loss"),
    ]:
        status, _, err = run(*arguments)
        assert status == 2, arguments
        assert message in err, arguments


def test_the_help_names_kinds_and_targets(draftwise):
    status, out, _ = draftwise("train", "--help")
    assert status == 0
    assert "draftwise train TARGET" in out
    assert "dspark" in out
    assert "best" not in out.split()
