"""``draftwise study`` as a user runs it, on tiny models."""

import json
import subprocess
import sys

import pytest

from draftwise.studies.catalogue import STUDIES

from ..tiny_models import Recipe
from .page import Page
from .running import assert_refused, write_prompts

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=300, context=128, tokenizer=True)
DRAFT = TARGET.draft(0.2)
COMPANION = TARGET.draft(0.2, noise_seed=2)


@pytest.fixture
def prompt_file(tmp_path):
    texts = ("abc", "a bed", "hi", "fed", "a cab", "dad")
    return write_prompts(tmp_path / "questions.jsonl", texts, "question")


@pytest.fixture
def command(models, draftwise, prompt_file, tmp_path):
    """Run the command with the tiny models; returns (exit status, stdout, stderr)."""

    def run(*arguments, prompts=prompt_file, roles=("target", "draft", "companion", "models")):
        recipes = {"target": TARGET, "draft": DRAFT, "companion": COMPANION, "models": COMPANION}
        named = [part for role in roles for part in (f"--{role}", models.folder(recipes[role]))]
        rest = ["--max-tokens", "12", "--long-text", "16", "--dtype", "float32"]
        rest += ["-o", str(tmp_path / "out")]
        if prompts is not None:
            rest += ["--prompts", str(prompts)]
        return draftwise("study", *named, *rest, *arguments)

    return run


def test_files_are_written_and_printed(command, tmp_path):
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
    # The recorded command has the names of files without their folders.
    assert str(tmp_path) not in content["command"]
    assert content["text"].split()[0] in out
    assert "standard deviation" in out


def test_the_page_loads_no_external_resources(command, tmp_path):
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


def test_list_describes_every_study(command):
    status, out, _ = command("list", prompts=None)
    assert status == 0
    for name in STUDIES:
        assert name in out


def test_invalid_input_is_refused(command):
    for arguments, field in (
        (["nonsense"], "name"),
        (["bounds", "all"], "name"),
        (["bounds", "--num-prompts", "0"], "--num-prompts"),
        (["bounds", "--batch-sizes", "0"], "--batch-sizes"),
        (["bounds", "--contexts", "1,x"], "--contexts"),
        (["bounds", "--temperature", "-1"], "--temperature"),
        (["bounds", "--temperature", "0"], "--temperature"),
        (["bounds", "--threads", "0"], "--threads"),
        (["signals", "--samplings", "1:2:3:4"], "--samplings"),
        (["bounds", "--redraw"], "--output"),
        (["all", "--redraw"], "--output"),
        (["bounds", "--output", "/proc/here"], "--output"),
    ):
        assert_refused(command(*arguments), f"{field}: ")
    assert_refused(command("bounds", prompts=None), "--prompts: ")


def test_a_target_and_a_draft_are_enough(command, tmp_path):
    roles = ("target", "draft")
    status, _, err = command("oracle-length", roles=roles)
    assert (status, err) == (0, "")
    content = json.loads((tmp_path / "out" / "oracle-length" / "data.json").read_text())
    assert content["settings"]["companion"] is None
    assert content["settings"]["models"] == [content["settings"]["draft"]]


def test_the_named_small_models_judge_the_same_drafts(command, models, tmp_path):
    other = models.folder(TARGET.draft(0.3, noise_seed=5))
    folder, times = tmp_path / "recordings", tmp_path / "times.json"
    arguments = ["signals", "--models", other, "--samplings", "0,1:0.9", "--batch-sizes", "1,2"]
    arguments += ["--recordings", str(folder), "--pass-times", str(times)]
    roles = ("target", "draft", "companion")
    status, _, err = command(*arguments, roles=roles)
    assert (status, err) == (0, "")
    data = tmp_path / "out" / "signals" / "data.json"
    content = json.loads(data.read_text())
    assert content["data"]["companions"] == [content["settings"]["companion"], other]
    assert list(content["data"]["samplings"]) == ["T=0", "T=1, top-p 0.9"]
    assert content["settings"]["recordings"] == "recordings"
    assert len(list(folder.iterdir())) == 2
    # Recordings and times are read again, so the result is the same.
    assert command(*arguments, roles=roles)[0] == 0
    assert json.loads(data.read_text())["data"] == content["data"]


def test_missing_models_are_reported_before_loading(command, tmp_path):
    for arguments, roles, begin in (
        (["bounds"], ("target",), "--draft: missing: "),
        (["bounds", "--draft", "none"], ("target",), "--draft: missing: "),
        (["bounds"], ("draft",), "--target: missing: --draft is "),
        (["bounds"], ("models",), "--target: missing: --models is "),
        (["bias"], ("target", "draft"), "--companion: missing: the study bias "),
        (
            ["oracle-length", "fairness"],
            ("target", "draft"),
            "--companion: missing: the study fairness ",
        ),
        (["bounds", "--max-model-len", "200"], ("target", "draft"), "--max-model-len: 200 "),
    ):
        assert_refused(command(*arguments, roles=roles), begin)
        assert not list((tmp_path / "out").glob("*"))


def test_all_skips_studies_without_their_models(command, monkeypatch):
    measured = []

    def run(console, names, settings, output, skip):
        assert skip
        measured.extend(names)
        raise SystemExit(0)

    monkeypatch.setattr(sys.modules["draftwise.cli.study"], "_run", run)
    status, out, _ = command("all", roles=("target", "draft"))
    assert status == 0
    for name, study in STUDIES.items():
        can_run = not study.needs_companion
        assert (name in measured) == can_run
        assert (f"{name} is skipped: --" in out) != can_run


def test_all_skips_studies_that_cannot_be_measured(command, monkeypatch, tmp_path):
    """Texts that are too short for one study do not end the other studies."""
    few = {name: STUDIES[name] for name in ("oracle-length", "acceptance-surface")}
    monkeypatch.setattr("draftwise.studies.catalogue.STUDIES", few)
    arguments = ["--max-tokens", "4", "--num-prompts", "2", "--batch-sizes", "1"]
    status, out, _ = command("all", *arguments)
    assert status == 0
    assert "acceptance-surface is skipped: --max-tokens: too few" in out
    assert [file.name for file in (tmp_path / "out").iterdir() if file.is_dir()] == [
        "oracle-length"
    ]
    ran = command("acceptance-surface", *arguments)
    assert_refused(ran, "--max-tokens: too few")


@pytest.mark.parametrize("name", ["list", "bounds"])
def test_only_studies_that_draw_need_the_packages_for_figures(name):
    """In a separate process, in which the packages cannot be imported."""
    script = (
        "import sys\n"
        "sys.modules.update(matplotlib=None, jinja2=None)\n"
        f"sys.argv[1:] = ['study', {name!r}]\n"
        "from draftwise.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if name == "list":
        assert (done.returncode, done.stderr) == (0, "")
        assert all(study in done.stdout for study in STUDIES)
    else:
        assert done.returncode == 2
        assert "install draftwise[studies]" in done.stderr
