"""Commands with models from outside the zoo: target, draft and companion."""

import io
import json
import sys

import pytest

from draftwise.profiling.latency_profile import LatencyProfile
from draftwise.profiling.passes import Stage

from ..tiny_models import Recipe
from .running import assert_refused, write_prompts

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=300, context=128, tokenizer=True)
RECIPES = {
    "target": TARGET,
    "draft": TARGET.draft(0.2),
    "companion": TARGET.draft(0.2, noise_seed=2),
}


@pytest.fixture
def command(models, monkeypatch, draftwise, tmp_path):
    """Run a command in an empty folder; ``OWN:draft`` means the folder of that tiny model."""

    def run(*arguments):
        words = [
            models.folder(RECIPES[each.removeprefix("OWN:")]) if each.startswith("OWN:") else each
            for each in arguments
        ]
        monkeypatch.chdir(tmp_path)
        return draftwise(*words, columns=200)

    write_prompts(tmp_path / "p.jsonl", ("abc", "a bed", "hi", "fed"))
    return run


BENCHMARK = (
    *("benchmark", "--workload", "p.jsonl", "--target", "OWN:target", "--max-tokens", "6"),
    *("--rounds", "2", "--batch-sizes", "2"),
)


def test_benchmark_of_a_target_without_a_draft(command, tmp_path):
    """The maximum prompt length is limited by the short context."""
    status, _, err = command(*BENCHMARK, "--peers", "transformers,vllm=/nowhere/python")
    assert status == 0
    assert err.splitlines()[0].startswith("no draft: only ")
    report = json.loads((tmp_path / "benchmark" / "results.json").read_text())
    assert report["contenders"].keys() == {"none", "transformers", "vllm"}
    assert report["contenders"]["none"]["policy"] == "none"
    assert report["models"].keys() == {"target"}
    (cell,) = report["cells"]
    assert cell["contenders"]["none"]["num_tokens"] == 24
    assert cell["contenders"]["transformers"]["num_tokens"] == 24
    settings = report["settings"]
    assert settings["draft"] is None
    assert (settings["longest_prompt"], settings["max_model_len"]) == (128 - 6 - 10, 128)


@pytest.mark.parametrize(
    ("named", "contenders"),
    [
        (["--draft", "OWN:draft"], {"none", "fixed", "adaptive"}),
        (
            ["--draft", "OWN:draft", "--companion", "OWN:companion"],
            {"none", "fixed", "adaptive", "sv"},
        ),
    ],
)
def test_benchmark_measures_the_policies_that_fit_the_models(command, tmp_path, named, contenders):
    status, _, err = command(*BENCHMARK, *named, "--learning-turns", "0")
    assert (status, err) == (0, "")
    report = json.loads((tmp_path / "benchmark" / "results.json").read_text())
    assert report["contenders"].keys() == contenders
    assert report["models"].keys() == {"target", *(n[2:] for n in named if n.startswith("--"))}


def test_benchmark_with_a_shorter_context(command, tmp_path):
    status, _, _ = command(*BENCHMARK, "--max-model-len", "40", "--draft", "none")
    assert status == 0
    settings = json.loads((tmp_path / "benchmark" / "results.json").read_text())["settings"]
    assert (settings["longest_prompt"], settings["max_model_len"]) == (40 - 6 - 10, 40)


@pytest.mark.parametrize("named", [(), ("--draft", "OWN:draft")])
def test_profile_latency_of_own_models(command, tmp_path, named):
    arguments = ["profile-latency", "--target", "OWN:target", "--max-batch-size", "2", *named]
    status, _, err = command(*arguments, "--contexts", "16", "--max-model-len", "64")
    assert status == 0
    assert err.startswith("no draft: only ") == (not named)
    stages = LatencyProfile.load(tmp_path / "latency.json").costs.keys()
    assert stages == ({Stage.TARGET, Stage.DRAFT} if named else {Stage.TARGET})


def test_profile_latency_within_a_shorter_context(command):
    arguments = ["profile-latency", "--target", "OWN:target", "--max-batch-size", "2"]
    status, _, err = command(*arguments, "--contexts", "60", "--max-model-len", "64")
    assert status == 2
    assert "error --contexts: " in err


@pytest.mark.parametrize(
    "named",
    [
        (),
        ("--draft", "OWN:draft", "--policy", "fixed"),
        ("--draft", "OWN:draft", "--companion", "OWN:companion", "--policy", "staged"),
    ],
)
def test_chat_with_own_models(command, monkeypatch, named):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a bed\n"))
    status, out, err = command("chat", "OWN:target", "--max-tokens", "6", *named)
    assert (status, err) == (0, "")
    assert "6 tokens" in out


def test_generate_with_settings_of_vllm(command, models):
    vllms = {"method": "draft_model", "model": models.folder(RECIPES["draft"]), "policy": "fixed"}
    named = ("--target", "OWN:target", "--speculative-config", json.dumps(vllms), "--compare")
    status, _, err = command("generate", "a bed", "--max-tokens", "6", "--json", *named)
    assert status == 0
    assert f"draft   {vllms['model']}" in err
    assert "fixed" in err


def test_errors_in_a_chat_name_flags(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("deaf " * 60 + "\n"))
    status, out, _ = command("chat", "OWN:target")
    assert status == 0
    assert "raise --max-model-len" in out


def test_missing_models_are_reported(command):
    for arguments, begin in (
        (["profile", "--prompts", "p.jsonl", "--target", "OWN:target"], "--draft: missing: "),
        (["profile", "--prompts", "p.jsonl", "--draft", "OWN:draft"], "--target: missing: "),
        (["profile-latency", "--draft", "OWN:draft"], "--target: missing: "),
        (
            ["profile-latency", "--target", "OWN:target", "--companion", "OWN:companion"],
            "--draft: missing: ",
        ),
        (
            ["benchmark", "--workload", "p.jsonl", "--draft", "OWN:draft"],
            "--target: missing: --draft is ",
        ),
        ([*BENCHMARK, "--policies", "sv"], "--draft: missing: --policies needs "),
        ([*BENCHMARK, "--max-model-len", "16"], "--max-model-len: 16 leaves 0 "),
        ([*BENCHMARK, "--max-model-len", "129"], "--max-model-len: 129 exceeds "),
        (["chat", "OWN:target", "--companion", "OWN:companion"], "--draft: missing: --companion "),
        (["chat", "OWN:target", "--policy", "sv"], "--draft: missing: --policy needs "),
        (["serve", "OWN:target", "--lenience", "0.5"], "--draft: missing: --lenience needs "),
    ):
        assert_refused(command(*arguments), begin)
