"""``draftwise train`` as a user runs it, on a tiny target."""

import dataclasses
import json
import re
import shutil
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwise import LLM
from draftwise.checkpoints.heads import read_head
from draftwise.cli.train_report import LearningCurve, describe, sparkline
from draftwise.distillation.eagle3 import Eagle3Recipe
from draftwise.distillation.run import TrainingRun, recipe_of
from draftwise.distillation.settings import Machine, TrainingSettings
from draftwise.errors import HeadTargetWarning, InvalidParameterError, UnsupportedModelError

from ..stand_ins import unguarded
from .training import PROMPTS, TARGET, assert_drafts


def test_a_head_is_written_in_the_layout_of_speculators(train, models, tmp_path):
    status, out, err = train("--tokens", "400", "--dtype", "float32")
    folder = tmp_path / "head"
    assert (status, err) == (0, "")
    assert str(folder) in out
    assert "accepted length" in out
    assert {file.name for file in folder.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "training.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["algorithm"] == "eagle3"
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {
        "name_or_path": Path(models.folder(TARGET)).name,
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["draft_vocab_size"] == 16
    assert config["transformer_layer_config"]["vocab_size"] == 40
    layer = "layers.0."
    shapes = {
        "fc.weight": (16, 32),
        f"{layer}hidden_norm.weight": (16,),
        f"{layer}input_layernorm.weight": (16,),
        f"{layer}post_attention_layernorm.weight": (16,),
        f"{layer}self_attn.q_proj.weight": (16, 32),
        f"{layer}self_attn.k_proj.weight": (8, 32),
        f"{layer}self_attn.v_proj.weight": (8, 32),
        f"{layer}self_attn.o_proj.weight": (16, 16),
        f"{layer}mlp.gate_proj.weight": (24, 16),
        f"{layer}mlp.up_proj.weight": (24, 16),
        f"{layer}mlp.down_proj.weight": (16, 24),
        "norm.weight": (16,),
        "lm_head.weight": (16, 16),
        "d2t": (16,),
        "t2d": (40,),
    }
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    ids = torch.arange(16) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert tensors["t2d"].dtype == torch.bool
    head, weights = read_head(folder)
    assert head.norm_before_residual
    assert weights.target_ids.tolist() == ids.tolist()
    training = json.loads((folder / "training.json").read_text())
    assert training["run"]["num_tokens"] >= 400
    assert any(name.startswith("accepted_length/T=") for name in training["evaluation"])
    card = (folder / "README.md").read_text()
    assert "inherits the terms of use" in card
    # No file says where the target, the prompts or the head lie.
    for file in ("README.md", "config.json", "training.json"):
        text = (folder / file).read_text()
        assert str(tmp_path) not in text
        assert str(Path(models.folder(TARGET)).parent) not in text
    assert training["run"]["prompts"] == training["settings"]["prompts"] == ["prompts.jsonl"]


def test_a_head_of_the_whole_vocabulary_has_no_map(train, tmp_path):
    status, _, _ = train("--tokens=200", draft_vocab=1000)
    assert status == 0
    config, weights = read_head(tmp_path / "head")
    assert config.draft_vocab_size == 40
    assert weights.target_ids.tolist() == list(range(40))
    assert not {"d2t", "t2d"} & load_file(tmp_path / "head" / "model.safetensors").keys()


def test_an_exit_is_written_that_drafts_on_the_target(train, models, tmp_path):
    status, out, err = train("--tokens=400", "--dtype=float32", "--exit=2", "--rank=8", kind="exit")
    folder = tmp_path / "head"
    assert (status, err) == (0, "")
    assert "accepted length" in out
    config = json.loads((folder / "config.json").read_text())
    assert config["draftwise_model_type"] == "exit"
    assert (config["exit"], config["adapter_rank"]) == (2, 8)
    title = f"# Early exit of {Path(models.folder(TARGET)).name}\n"
    assert title in (folder / "README.md").read_text()
    assert_drafts(models, folder)


@pytest.mark.parametrize(
    ("exit_after", "message"), [("0", "exit"), ("3", "before the target's last layer")]
)
def test_exits_that_the_target_does_not_have_are_refused(train, exit_after, message):
    status, _, err = train("--tokens=400", f"--exit={exit_after}", kind="exit")
    assert status != 0
    assert message in err


def test_a_model_is_written_that_serves_as_a_draft(train, models, tmp_path):
    status, out, err = train(
        "--tokens=400", "--dtype=float32", "--hidden-size=64", "--num-layers=1", kind="model"
    )
    folder = tmp_path / "head"
    assert (status, err) == (0, "")
    assert "accepted length" in out
    assert json.loads((folder / "training.json").read_text())["run"]["coverage"] == 1.0
    card = (folder / "README.md").read_text().splitlines()
    name = Path(models.folder(TARGET)).name
    start = card.index(f"# Draft for {name}") + 2
    assert card[start].endswith("in 1 layer of size 64, and the vocabulary of")
    assert card[start + 1] == f"`{name}`."
    assert_drafts(models, folder)


def test_a_head_serves_as_a_draft(train, models, tmp_path):
    train("--tokens=400", "--dtype=float32")
    assert_drafts(models, tmp_path / "head")


def test_answers_are_kept_for_later_runs(train, tmp_path):
    train("--tokens", "300")
    files = {file: file.read_text() for file in (tmp_path / "answers").iterdir()}
    assert len(files) == 2
    status, _, _ = train("--tokens", "300", output="second")
    assert status == 0
    assert {file: file.read_text() for file in (tmp_path / "answers").iterdir()} == files


def test_a_head_is_continued_on_texts(train, tmp_path, prompts):
    train("--tokens", "200")
    first = load_file(tmp_path / "head" / "model.safetensors")
    status, _, err = train(
        *("--tokens", "200", "--text", str(prompts), "--learning-rate", "1e-6"),
        *("--continue", str(tmp_path / "head")),
        output="second",
        draft_vocab=None,
    )
    assert (status, err) == (0, "")
    second = load_file(tmp_path / "second" / "model.safetensors")
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, atol=2e-2, rtol=2e-2)
    assert torch.equal(first["d2t"], second["d2t"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--tokens=1", "--minutes=1"), "--minutes"),
        (("--minutes=0",), "--minutes"),
        (("--temperatures=hot",), "--temperatures"),
        (("--loss=l2",), "--loss"),
        (("--length=20",), "--length"),
        (("--layers=1,9",), "--layers"),
        (("--layers=2,1",), "--layers"),
        (("--target=model.gguf",), "target: 'model.gguf' is quantised (GGUF)"),
        (("--target=zoo:target:int8",), "is quantised (int8)"),
        (("--length=65",), "--length: 65 exceeds"),
        (("--resume",), "--resume"),
        (("--continue=/nowhere",), "--draft-vocab"),
        (("--continue=/nowhere", "--layers=1"), "--layers"),
        (("--text=/nowhere",), "--text"),
        (("--held-out=0",), "--held-out"),
    ],
)
def test_errors_are_one_line(train, tmp_path, arguments, expected):
    given = arguments if "--minutes" in str(arguments) else (*arguments, "--tokens=100")
    status, _, err = train(*given, draft_vocab=None if "--layers=1" in arguments else 16)
    assert status == 2
    assert err.count("\n") == 1
    assert expected in err
    # Nothing was generated before the error.
    assert not (tmp_path / "answers").exists()


def test_heads_of_other_targets_are_refused_before_answers_are_generated(train, models, tmp_path):
    assert train("--tokens=100")[0] == 0
    shutil.rmtree(tmp_path / "answers")
    other = models.folder(dataclasses.replace(TARGET, vocab=44))
    status, _, err = train(
        *("--tokens=100", f"--continue={tmp_path / 'head'}", f"--target={other}"),
        output="second",
        draft_vocab=None,
    )
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error --continue: the head was made for a target with a vocabulary of")
    assert not (tmp_path / "answers").exists()


def test_heads_warn_of_other_targets_of_the_same_sizes(train, models, tmp_path):
    train("--tokens=100")
    head = unguarded(str(tmp_path / "head"), policy="fixed", num_speculative_tokens=2)

    def warnings_with(target):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            LLM(str(target), head).close()
        return [each for each in caught if each.category is HeadTargetWarning]

    own = Path(models.folder(TARGET))
    other = Path(models.folder(dataclasses.replace(TARGET, seed=TARGET.seed + 1)))
    renamed, tuned = tmp_path / "renamed", tmp_path / own.name
    shutil.copytree(own, renamed)
    shutil.copytree(other, tuned)
    assert not warnings_with(own)
    assert not warnings_with(renamed)
    assert not warnings_with(tuned)
    assert not warnings_with(f"{own}:int8")
    (found,) = warnings_with(other)
    assert f"trained for {own.name!r}" in str(found.message)


def test_folders_without_a_head_cannot_be_continued(train, tmp_path):
    status, _, err = train("--tokens=100", f"--continue={tmp_path}", draft_vocab=None)
    assert (status, err.count("\n")) == (2, 1)
    assert "--continue" in err


@pytest.mark.parametrize(
    "content", [None, "", '{"prompt": "one"}\n', '{"answer": "none"}\n', "not JSON\n"]
)
def test_files_without_prompts_are_refused(train, tmp_path, content):
    file = tmp_path / "other.jsonl"
    if content is not None:
        file.write_text(content)
    status, _, err = train("--tokens=100", files=[file])
    assert (status, err.count("\n")) == (2, 1)
    assert "--prompts" in err


def test_prompts_that_are_too_long_are_refused(train, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"prompt": "sea " * 40 + each}) + "\n" for each in PROMPTS))
    status, _, err = train("--tokens=100", files=[file])
    assert (status, err.count("\n")) == (2, 1)
    assert "room for an answer" in err


def test_finished_folders_are_not_overwritten(train):
    assert train("--tokens=100")[0] == 0
    status, _, err = train("--tokens=100")
    assert status == 2
    assert "another folder" in err


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "eagle3", "tokens": 600, "draft_vocab": 16, "num_steps": 3},
        # The blocks of a step are chosen by its place in the data.
        {
            "kind": "dspark",
            "tokens": 500,
            "draft_vocab": 16,
            "num_layers": 1,
            "num_anchors": 6,
            "markov_rank": 8,
            "loss": "dspark",
        },
        {"kind": "companion", "tokens": 600, "num_layers": 1, "hidden_size": 64, "draft": "DRAFT"},
    ],
    ids=lambda settings: settings["kind"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(models, prompts, tmp_path, settings):
    if "draft" in settings:
        settings = {**settings, "draft": models.folder(TARGET.draft(0.1))}
    settings = TrainingSettings(
        target=models.folder(TARGET),
        prompts=(str(prompts),),
        max_tokens=24,
        length=48,
        batch_tokens=96,
        **settings,
    )
    machine, results = Machine("float32", "cpu", answers=tmp_path / "answers"), []
    for name, parts in (("whole", [None]), ("parts", [1, 2, None])):
        output = tmp_path / name
        output.mkdir()
        for index, max_steps in enumerate(parts):
            run = TrainingRun(settings, recipe_of(settings), output, machine, resume=index > 0)
            values = run.run(max_steps)
        assert run.trainer.progress == 1.0
        tensors = load_file(output / "model.safetensors") | run.trainer.task.model.state_dict()
        results.append((values, tensors))
    assert results[0][0] == results[1][0]
    # Of the greedy answers and of the sampled ones.
    assert {re.sub(".*/", "", name) for name in values if "T=" in name} == {"T=0", "T=1"}
    for name, weight in results[0][1].items():
        assert torch.equal(weight, results[1][1][name]), name


def test_other_settings_are_refused_when_resuming(train, tmp_path, models, prompts):
    settings = TrainingSettings(
        "eagle3", models.folder(TARGET), (str(prompts),), tokens=600, max_tokens=24, length=48
    )
    (tmp_path / "head").mkdir()
    machine = Machine(answers=tmp_path / "answers")
    TrainingRun(settings, Eagle3Recipe(settings), tmp_path / "head", machine).run(0)
    status, _, err = train("--tokens=500", "--resume")
    assert status == 2
    assert "tokens = 600" in err
    status, _, err = train("--tokens=500")
    assert status == 2
    assert "unfinished" in err


@pytest.mark.parametrize("changed", ["fingerprint", "dtype"])
def test_another_target_is_refused_when_resuming(models, prompts, tmp_path, changed):
    """The target's folder may have changed, and the data type is not a setting of the training."""
    target = tmp_path / "target"
    shutil.copytree(models.folder(TARGET), target)
    settings = TrainingSettings(
        "eagle3", str(target), (str(prompts),), tokens=600, max_tokens=24, length=48
    )
    (tmp_path / "head").mkdir()
    dtype, answers = "float32", tmp_path / "answers"
    run = partial(TrainingRun, settings, Eagle3Recipe(settings), tmp_path / "head")
    run(Machine(dtype, "cpu", answers=answers)).run(0)
    if changed == "fingerprint":
        weights = load_file(target / "model.safetensors")
        name = next(iter(weights))
        weights[name] = weights[name] + 1
        save_file(weights, target / "model.safetensors", {"format": "pt"})
    else:
        dtype = "bfloat16"
    with pytest.raises(InvalidParameterError, match=f"^resume: .*target with {changed}"):
        run(Machine(dtype, "cpu", answers=answers), resume=True)


def test_a_failed_start_leaves_the_folder_usable(train, monkeypatch):
    def refuse(self, *arguments):
        raise UnsupportedModelError("target", "no draft can be made for it")

    assert train("--tokens=100", "--layers=1,9")[0] == 2
    with monkeypatch.context() as patch:
        # After the answers.
        patch.setattr(Eagle3Recipe, "prepare", refuse)
        status, _, err = train("--tokens=100", "--layers=1,2")
    assert (status, err) == (2, "error --target: no draft can be made for it\n")
    assert train("--tokens=100", "--layers=1,3")[0] == 0


@pytest.mark.parametrize("moment", ["held-out prompts", "loading the target for training"])
def test_an_early_interruption_says_to_run_the_command_again(train, monkeypatch, moment):
    def interrupt(self, text):
        if text.startswith(moment):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LearningCurve, "status", interrupt)
        status, out, _ = train("--tokens=100")
    assert status == 130
    assert "run the command again; answers are kept" in out
    assert train("--tokens=100")[0] == 0


def test_the_hint_after_an_interruption_works(train, monkeypatch):
    def interrupt(self, facts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LearningCurve, "begin", interrupt)
        status, out, _ = train("--tokens=100")
    assert status == 130
    assert "repeat the command with --resume" in out
    assert train("--tokens=100", "--resume")[0] == 0


def test_descriptions():
    values = {"accepted_length/T=0": 2.5, "acceptance/T=0": 0.7}
    assert describe(values) == "accepted length 2.50 (first token 0.70) at T=0"
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" or sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert len(sparkline([float(each) for each in range(500)])) == 40
