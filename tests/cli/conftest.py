"""``draftwise train`` as a user runs it, on a tiny target."""

import json
import sys

import pytest

from draftwise.cli import main

from .training import PROMPTS, SMALL, TARGET


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    return file


@pytest.fixture
def train(models, monkeypatch, capsys, tmp_path, prompts):
    """Run the command with a tiny target; returns (exit status, stdout, stderr)."""

    def run(*arguments, kind="eagle3", output="head", files=(prompts,), draft_vocab=16):
        every = ["draftwise", "train", kind, "--target", models.folder(TARGET), *SMALL]
        if kind == "eagle3":
            every.append("--steps=2")
        every += [f"--prompts={file}" for file in files]
        every += ["-o", str(tmp_path / output), "--answers", str(tmp_path / "answers")]
        if draft_vocab is not None and kind == "eagle3":
            every.append(f"--draft-vocab={draft_vocab}")
        monkeypatch.setattr(sys, "argv", [*every, *arguments])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return run
