"""The command line in this process, and ``draftwise train`` on a tiny target."""

import sys

import pytest

from draftwise.cli import main

from .running import write_prompts
from .training import PROMPTS, SMALL, TARGET


@pytest.fixture
def draftwise(monkeypatch, capsys):
    """Run the command line; returns (exit status, stdout, stderr)."""

    def run(*arguments, columns=120):
        monkeypatch.setattr(sys, "argv", ["draftwise", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts."""
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture
def train(models, draftwise, tmp_path, prompts):
    """Run the command with a tiny target; returns (exit status, stdout, stderr)."""

    def run(*arguments, kind="eagle3", output="head", files=(prompts,), draft_vocab=16):
        every = ["train", kind, "--target", models.folder(TARGET), *SMALL]
        if kind == "eagle3":
            every.append("--steps=2")
        every += [f"--prompts={file}" for file in files]
        every += ["-o", tmp_path / output, "--answers", tmp_path / "answers"]
        if draft_vocab is not None and kind == "eagle3":
            every.append(f"--draft-vocab={draft_vocab}")
        return draftwise(*every, *arguments)

    return run
