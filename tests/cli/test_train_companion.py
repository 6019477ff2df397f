"""``draftwise train companion`` as a user runs it, on a tiny target."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ..tiny_heads import HeadRecipe
from .training import TARGET, assert_drafts

DRAFT = TARGET.draft(0.1)
HEAD = HeadRecipe(vocab=40, draft_vocab=16, layers=(1, 2, 3))
WITH_DRAFT = {
    "draft_accepted_length",
    "draft_acceptance",
    "draft_target_overlap",
    "overlap",
    "correlation",
    "information",
    "draft_information",
    "entropy",
    "num_tokens",
}
ALONE = {"accepted_length", "acceptance", "target_overlap"}


@pytest.fixture
def companion(train, tmp_path):
    """Train a companion; returns (status, stdout, stderr, training.json)."""

    def run(*arguments, **settings):
        given = arguments if "--tokens" in str(arguments) else ("--tokens=400", *arguments)
        result = train("--dtype=float32", *given, kind="companion", **settings)
        file = tmp_path / settings.get("output", "head") / "training.json"
        return *result, json.loads(file.read_text()) if file.exists() else None

    return run


def figures(training):
    """Names of the figures, by temperature."""
    found = {}
    for name in training["evaluation"]:
        figure, _, temperature = name.partition("/T=")
        found.setdefault(temperature, set()).add(figure)
    return found


def test_a_companion_is_compared_with_the_draft_that_it_will_score(companion, models, tmp_path):
    draft = models.folder(DRAFT)
    status, out, err, training = companion(f"--draft={draft}")
    assert (status, err) == (0, "")
    assert figures(training) == {"0": ALONE | WITH_DRAFT, "1": ALONE | WITH_DRAFT}
    evaluation = training["evaluation"]
    for name in ("target_overlap/T=1", "draft_target_overlap/T=1", "overlap/T=1"):
        assert 0 < evaluation[name] < 1
    # The draft is the target with noise, and the companion was hardly trained.
    assert evaluation["draft_target_overlap/T=1"] > evaluation["target_overlap/T=1"]
    assert evaluation["draft_accepted_length/T=1"] > evaluation["accepted_length/T=1"]
    # As many layers as the draft, and a multiple of 64 that is at least 1.5 times its size.
    run = training["run"]
    assert (run["num_layers"], run["hidden_size"]) == (3, 64)
    parameters = sum(each.numel() for each in models.reference(DRAFT).parameters())
    assert run["draft_parameters"] == parameters
    assert run["draft"] == training["settings"]["draft"] == Path(draft).name
    assert f"{run['num_parameters'] / parameters:.1f} times those of the draft" in out
    assert "the draft's" in out
    folder = tmp_path / "head"
    card = (folder / "README.md").read_text()
    assert f"# Companion for {Path(models.folder(TARGET)).name}\n" in card
    assert f'draft="{Path(draft).name}", companion="path/of/this/folder"' in card
    assert "## What it knows of the draft" in card
    for row in (f"| {evaluation['overlap/T=1']:.3f} |", f"{evaluation['information/T=1']:.3f} |"):
        assert row in card
    for file in ("README.md", "config.json", "training.json"):
        text = (folder / file).read_text()
        assert str(tmp_path) not in text
        assert str(Path(draft).parent) not in text
    found = assert_drafts(models, draft, companion=str(folder), policy="sv-published")
    assert found.num_drafted > 0


def test_a_companion_of_a_head_is_as_large_as_without_a_draft(companion, tmp_path):
    head = HEAD.save(tmp_path / "drafting", "speculators")
    status, _, err, training = companion(f"--draft={head}", "--hidden-size=64")
    assert (status, err) == (0, "")
    assert figures(training)["1"] == ALONE | WITH_DRAFT
    assert training["run"]["num_layers"] == 2
    assert training["run"]["draft_parameters"] == sum(
        tensor.numel() for name, tensor in HEAD.tensors().items() if name not in ("d2t", "t2d")
    )


def test_a_companion_without_a_draft_is_compared_with_the_target(companion, tmp_path):
    status, out, err, training = companion("--tokens=100")
    assert (status, err) == (0, "")
    assert figures(training) == {"0": ALONE, "1": ALONE}
    assert (training["run"]["num_layers"], training["run"]["hidden_size"]) == (2, 192)
    assert "draft" not in training["run"]
    # Of settings, those of its kind.
    assert {"num_layers", "draft"} <= training["settings"].keys()
    assert not {"exit", "layers", "num_steps", "adapter_rank"} & training["settings"].keys()
    card = (tmp_path / "head" / "README.md").read_text()
    assert 'draft="path/of/the/draft", companion="path/of/this/folder"' in card
    assert "What it knows" not in card
    assert "overlap with the target" in out


def test_it_holds_out_the_prompts_of_a_draft_and_begins_from_other_weights(
    companion, train, tmp_path
):
    """With the seed of the draft, the companion reads no prompt that the draft is measured on."""
    status, _, _ = train(
        "--tokens=100", "--dtype=float32", "--hidden-size=64", "--learning-rate=1e-9", kind="model"
    )
    assert status == 0
    answers = {file: file.read_text() for file in (tmp_path / "answers").iterdir()}
    status, *_ = companion(
        *("--tokens=100", "--num-layers=2", "--hidden-size=64", "--learning-rate=1e-9"),
        output="second",
    )
    assert status == 0
    # The same prompts were answered in the same order.
    assert {file: file.read_text() for file in (tmp_path / "answers").iterdir()} == answers
    runs = [
        json.loads((tmp_path / name / "training.json").read_text())["run"]
        for name in ("head", "second")
    ]
    assert runs[0]["num_data_tokens"] == runs[1]["num_data_tokens"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("head", "second")]
    name = "model.embed_tokens.weight"
    assert weights[0][name].shape == weights[1][name].shape
    assert torch.corrcoef(torch.stack([each[name].flatten() for each in weights]))[0, 1].abs() < 0.1


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("suffix", "must be a model or an EAGLE-3 head, got 'suffix'"),
        ("target:exit=1", "must be a model or an EAGLE-3 head"),
        ("/nowhere", "there is no folder '/nowhere'"),
        ("zoo:draft:int8", "is quantised (int8)"),
        ("OTHER", "has other tokens than the target"),
        ("SHORT", "cannot be measured: 48 exceeds the draft's context of 32 tokens"),
        ("WIDE HEAD", "cannot be measured: the head was made for a target"),
        ("DEEP HEAD", "cannot be measured: a head with 2 layers"),
    ],
)
def test_drafts_that_cannot_be_measured_are_refused(companion, models, tmp_path, draft, message):
    made = {
        "OTHER": dataclasses.replace(DRAFT, vocab=44, tokenizer=False),
        "SHORT": dataclasses.replace(DRAFT, context=32),
    }
    heads = {
        "WIDE HEAD": HeadRecipe(vocab=44, draft_vocab=44, layers=(1, 2, 3)),
        "DEEP HEAD": HEAD.changed(num_layers=2),
    }
    if draft in made:
        draft = models.folder(made[draft])
    elif draft in heads:
        draft = heads[draft].save(tmp_path / "drafting", "speculators")
    status, _, err, training = companion(f"--draft={draft}", "--hidden-size=64", "--num-layers=1")
    assert (status, err.count("\n"), training) == (2, 1, None)
    assert err.startswith("error --draft: ")
    assert message in err
    # Nothing was generated before the error.
    assert not (tmp_path / "answers").exists()
