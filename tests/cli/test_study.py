"""``draftwise study`` as a user runs it, on tiny models."""

import json
import sys

import pytest

from draftwise.cli import main
from draftwise.studies.registry import STUDIES

from ..tiny_models import Recipe
from .page import Page

TARGET = Recipe(vocab=300, context=128, tokenizer=True)
DRAFT = TARGET.draft(0.2)
COMPANION = TARGET.draft(0.2, noise_seed=2)


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "questions.jsonl"
    texts = ("abc", "a bed", "hi", "fed", "a cab", "dad")
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    return file


@pytest.fixture
def command(models, monkeypatch, capsys, prompt_file, tmp_path):
    """Run the command with the tiny models; gives (exit status, stdout, stderr)."""

    def run(*arguments, prompts=prompt_file):
        named = ["--target", models.folder(TARGET), "--draft", models.folder(DRAFT)]
        named += ["--companion", models.folder(COMPANION), "--models", models.folder(COMPANION)]
        rest = ["--max-tokens", "12", "--long-text", "16", "--dtype", "float32"]
        rest += ["-o", str(tmp_path / "out")]
        if prompts is not None:
            rest += ["--prompts", str(prompts)]
        monkeypatch.setattr(sys, "argv", ["draftwise", "study", *named, *rest, *arguments])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return run


def test_files_and_words(command, tmp_path):
    status, out, err = command("oracle-length")
    assert (status, err) == (0, "")
    folder = tmp_path / "out" / "oracle-length"
    assert {file.name for file in folder.iterdir()} == {
        *("data.json", "figure.svg", "figure.png", "text.md")
    }
    content = json.loads((folder / "data.json").read_text())
    assert content["data"]["num_drafts"] > 0
    assert content["settings"]["max_tokens"] == 12
    assert content["command"].startswith("draftwise study ")
    # The command names files, not where they lie here.
    assert str(tmp_path) not in content["command"]
    assert content["text"].split()[0] in out
    assert "standard deviation" in out


def test_the_page_needs_nothing_else(command, tmp_path):
    assert command("oracle-length", "rejection")[0] == 0
    data = tmp_path / "out" / "rejection" / "data.json"
    before = data.read_text()
    status, out, _ = command("all", "--redraw")
    assert status == 0
    assert "report.html" in out
    assert data.read_text() == before
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert page.open == []
    assert page.pictures == 2
    assert page.fetched == []


def test_the_list(command):
    status, out, _ = command("list", prompts=None)
    assert status == 0
    for name in STUDIES:
        assert name in out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["nonsense"], "name"),
        (["bounds", "all"], "name"),
        (["bounds", "--num-prompts", "0"], "num_prompts"),
        (["bounds", "--batch-sizes", "0"], "batch_sizes"),
        (["bounds", "--contexts", "1,x"], "contexts"),
        (["bounds", "--temperature", "-1"], "temperature"),
        (["bounds", "--temperature", "0"], "temperature"),
        (["bounds", "--threads", "0"], "threads"),
        (["bounds", "--redraw"], "output"),
        (["all", "--redraw"], "output"),
        (["bounds", "--output", "/proc/here"], "output"),
    ],
)
def test_bad_input(command, arguments, field):
    status, _, err = command(*arguments)
    assert status == 2
    assert err.startswith(f"error {field}: ")


def test_prompts_have_to_be_named(command):
    status, _, err = command("bounds", prompts=None)
    assert status == 2
    assert err.startswith("error prompts: ")
