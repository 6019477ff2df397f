"""``draftwise train mtp`` as a user runs it, on tiny targets with and without an MTP layer."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwise import LLM, SamplingParams
from draftwise.errors import InvalidParameterError, UnsupportedModelError

from ..stand_ins import unguarded
from ..tiny_models import Recipe
from ..tiny_mtp import LAYERS, QWEN
from .training import SMALL
from .training import TARGET as LLAMA

TARGET = Recipe(
    "qwen3_5", vocab=40, context=64, seed=3, tokenizer=True, config={"layer_types": LAYERS}
)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

pytestmark = pytest.mark.slow


@pytest.fixture
def train_mtp(models, draftwise, tmp_path, prompts):
    """Run the command; returns (exit status, stdout, stderr)."""

    def run(*arguments, target=None, output="layer"):
        every = ["train", "mtp", "--target", target or models.folder(TARGET), *SMALL, "--steps=2"]
        every += [f"--prompts={prompts}", "-o", tmp_path / output, "--dtype=float32"]
        return draftwise(*every, "--answers", tmp_path / "answers", "--tokens=400", *arguments)

    return run


def assert_drafts(target, draft):
    """A layer drafts for its target, whose greedy text stays the same."""
    with LLM(target, dtype="float32") as llm:
        expected = llm.generate("red sea", GREEDY)[0].token_ids
    for each in (draft, ["suffix", draft]):
        speculation = unguarded(each, policy="fixed", num_speculative_tokens=3)
        with LLM(target, speculation, dtype="float32") as llm:
            output = llm.generate("red sea", GREEDY)[0]
        assert output.token_ids == expected
        assert output.speculation.num_drafted > 0


def test_a_new_layer_is_written_and_continued(train_mtp, models, tmp_path):
    status, out, err = train_mtp()
    folder = tmp_path / "layer"
    assert status == 0, err
    assert "accepted length" in out
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "draftwise_model_type": "mtp",
        "target_model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "vocab_size": 40,
    }
    first = load_file(folder / "model.safetensors")
    assert {name.rsplit(".", 1)[0] + "." for name in first} >= {
        name for name in QWEN.values() if not name.startswith("mtp.layers")
    }
    training = json.loads((folder / "training.json").read_text())
    assert training["run"]["is_new"]
    assert "`mtp.*`" in (folder / "README.md").read_text()
    assert_drafts(models.folder(TARGET), str(folder))
    status, _, err = train_mtp(f"--continue={folder}", "--learning-rate=1e-6", output="second")
    assert status == 0, err
    second = load_file(tmp_path / "second" / "model.safetensors")
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, atol=2e-2, rtol=2e-2)


def test_the_layer_of_the_target_is_continued(train_mtp, models, tmp_path):
    assert train_mtp()[0] == 0
    # A user may add the tensors to the target's files.
    target = shutil.copytree(models.folder(TARGET), tmp_path / "target")
    tensors = load_file(tmp_path / "layer" / "model.safetensors")
    file = target / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    assert_drafts(str(target), "mtp")
    status, _, err = train_mtp("--learning-rate=1e-6", target=str(target), output="second")
    assert status == 0, err
    training = json.loads((tmp_path / "second" / "training.json").read_text())
    assert not training["run"]["is_new"]
    second = load_file(tmp_path / "second" / "model.safetensors")
    for name, weight in tensors.items():
        torch.testing.assert_close(second[name], weight, atol=2e-2, rtol=2e-2)


def test_other_targets_are_refused(train_mtp, models, tmp_path):
    status, _, err = train_mtp(target=models.folder(LLAMA))
    assert (status, err.count("\n")) == (2, 1)
    assert "MTP layers of llama are not trained" in err
    status, _, err = train_mtp(f"--continue={tmp_path}")
    assert (status, err.count("\n")) == (2, 1)
    assert "there is no MTP layer" in err
    # Nothing was generated before the error.
    assert not (tmp_path / "answers").exists()


def test_layers_of_other_targets_are_refused(train_mtp, models, tmp_path):
    assert train_mtp()[0] == 0
    folder = str(tmp_path / "layer")
    with pytest.raises(UnsupportedModelError, match="target_model_type"):
        LLM(models.folder(LLAMA), {"draft": folder}, dtype="float32")
    larger = models.folder(dataclasses.replace(TARGET, vocab=44))
    with pytest.raises(UnsupportedModelError, match="a target with vocab_size 40, and this one"):
        LLM(larger, {"draft": folder}, dtype="float32")
    with pytest.raises(InvalidParameterError, match="not quantised"):
        LLM(models.folder(TARGET), {"draft": f"{folder}:int8"}, dtype="float32")
    with pytest.raises(UnsupportedModelError, match="an MTP layer of a target"):
        LLM(folder)
