"""``draftwise profile`` as a user runs it, on tiny models."""

import json

import pytest

from draftwise.estimators.profile import AcceptanceProfile
from draftwise.profiling import acceptance

from ..tiny_models import Recipe
from .running import assert_refused, write_prompts

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=300, context=96, tokenizer=True)
DRAFT = TARGET.draft(0.2)
COMPANION = TARGET.draft(0.2, noise_seed=2)
TEXTS = ["abc", "cab", "bed", "fed", "a bed", "hi"]


@pytest.fixture
def prompt_file(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", TEXTS)


@pytest.fixture
def command(models, draftwise, prompt_file, tmp_path):
    """Run the command with the tiny models; returns (exit status, stdout, stderr)."""

    def run(*arguments, companion=True, prompts=prompt_file):
        named = ["--target", models.folder(TARGET), "--draft", models.folder(DRAFT)]
        if companion:
            named += ["--companion", models.folder(COMPANION)]
        rest = ["--prompts", str(prompts), "-o", str(tmp_path / "profile.safetensors")]
        rest += ["--max-tokens", "8", "--num-speculative-tokens", "3", "--dtype", "float32"]
        return draftwise("profile", *named, *rest, *arguments)

    return run


def load(tmp_path):
    return AcceptanceProfile.load(tmp_path / "profile.safetensors")


def test_a_profile_and_its_summary_are_written(command, tmp_path):
    status, out, err = command()
    assert (status, err) == (0, "")
    profile = load(tmp_path)
    summary = profile.summary
    assert profile.provenance["num_prompts"] == "6"
    assert profile.provenance["temperature"] == "1.0"
    assert set(profile.parameters) == {"combined", "predictable", "disco", "specdec++"}
    assert f"{summary.num_tokens} drafted tokens in {summary.num_chains} drafts of 6 prompts" in out
    assert f"{summary.mean_acceptance:.3f}" in out
    assert " ".join(f"{p:.2f}" for p in summary.acceptance_by_position) in out
    assert len(summary.acceptance_by_position) == 3
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    for binning, table in profile.tables.items():
        row = rows[f"S,A {binning}"]
        assert row[2] == str(table.num_cells)
        assert row[3] == f"{summary.gains[f'S,A {binning}'].plain:.3f}"
        assert row[-1] == f"{summary.calibration_errors[binning]:.3f}"
    for role in ("target", "draft", "companion"):
        assert profile.provenance[role] in out
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "profile.safetensors",
        "prompts.jsonl",
    ]


def test_a_profile_without_a_companion(command, tmp_path):
    status, out, _ = command("--temperature", "0", "--num-prompts", "2", companion=False)
    assert status == 0
    assert "S,A" not in out
    profile = load(tmp_path)
    assert profile.provenance["companion"] == "none"
    assert profile.provenance["num_prompts"] == "2"
    assert not profile.tables
    assert set(profile.parameters) == {"disco", "specdec++"}


def test_chat_changes_the_prompts(command, tmp_path):
    prompts = []
    for arguments in ([], ["--chat"]):
        assert command(*arguments, "--num-prompts", "2", companion=False)[0] == 0
        prompts.append(load(tmp_path).provenance["prompts"])
    assert prompts[0] != prompts[1]


def test_an_interrupted_run_is_resumed(command, tmp_path, monkeypatch):
    assert command()[0] == 0
    whole = load(tmp_path).summary
    (tmp_path / "profile.safetensors").unlink()

    class Recorder(acceptance._Recorder):
        def take(self, request_id):
            records = super().take(request_id)
            if request_id == 3:
                raise KeyboardInterrupt
            return records

    arguments = ["--batch-size", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(acceptance, "_Recorder", Recorder)
        assert command(*arguments)[0] == 130
    assert (tmp_path / "profile.partial.safetensors").is_file()
    assert not (tmp_path / "profile.safetensors").exists()

    status, _, err = command(*arguments, "--temperature", "0.5")
    assert status == 2
    assert err.startswith("error --output: ")
    assert "temperature (1.0, now 0.5)" in err

    status, out, _ = command(*arguments)
    assert status == 0
    assert "resumed after 3 prompts" in out
    assert not (tmp_path / "profile.partial.safetensors").exists()
    resumed = load(tmp_path).summary
    assert resumed.num_tokens == whole.num_tokens
    assert resumed.mean_acceptance == pytest.approx(whole.mean_acceptance, abs=1e-4)


def test_too_long_prompts_are_skipped(command, tmp_path, prompt_file):
    prompt_file.write_text(prompt_file.read_text() + json.dumps({"prompt": "deaf " * 60}) + "\n")
    status, out, _ = command(companion=False)
    assert status == 0
    assert "1 prompts were skipped" in out
    assert "of 6 prompts" in out


def test_user_errors_print_one_line_and_exit_with_status_2(command):
    for arguments, field in (
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--max-tokens", "2"], "--max-tokens"),
        (["--num-speculative-tokens", "65"], "--num-speculative-tokens"),
        (["--companion", "/no/such/model"], "--companion"),
        (["--draft", "none"], "--draft"),
        (["--dtype", "int3"], "--dtype"),
        (["--prompts", "/no/such/file.jsonl"], "--prompts"),
        (["-o", "/no/such/folder/profile"], "--output"),
        (["-o", "/"], "--output"),
    ):
        assert_refused(command(*arguments), f"{field}: ")
    for option in ("--num-prompts", "--batch-size", "--num-speculative-tokens"):
        status, _, err = command(option, "0")
        assert status == 2
        assert option in err
