"""The documentation agrees with the registry and the command, and its examples run."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import typer

import draftwise
from draftwise.cli.app import app
from draftwise.policies import POLICIES, Signal
from draftwise.policies.catalogue import options_of

from . import forked

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_NEEDS = ("draft", "companion", "profile", "latency")


def documented_tables():
    """For each policy, the cells of all tables of docs/policies.md by column name."""
    policies = {}
    heads = []
    for line in (ROOT / "docs" / "policies.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        elif not set(line) <= set("|-"):
            row = dict(zip(heads, cells, strict=True))
            policies.setdefault(row.pop("policy").strip("`"), {}).update(row)
    return policies


DOCUMENTED = documented_tables()


def test_policies_are_documented_in_the_order_of_the_registry():
    assert list(DOCUMENTED) == list(POLICIES)


def test_documentation_of_a_policy_agrees_with_its_class():
    for name in POLICIES:
        policy, row = POLICIES[name], DOCUMENTED[name]
        signals = ", ".join(signal.value for signal in Signal if signal in policy.signals)
        needs = ", ".join(what for what in _NEEDS if getattr(policy, f"needs_{what}"))
        options = ", ".join(f"{key} = {value}" for key, value in options_of(policy).items())
        assert row == {
            "what it does": policy.summary,
            "when to use it": row["when to use it"],
            "looks at": signals or "–",
            "needs": needs or "–",
            "lossless": "yes" if policy.lossless else "greedy only",
            "options": options or "–",
            "source": policy.source,
        }
        assert row["when to use it"], name


def test_policies_that_depend_on_time_are_documented():
    text = (ROOT / "docs" / "policies.md").read_text()
    section = text.split("## What depends on time")[1].split("\n## ")[0]
    first = section.split("step times")[0]
    by_time = {name for name, policy in POLICIES.items() if policy.needs_latency}
    assert set(re.findall(r"`([^`]+)`", first)) == by_time - {"oracle"}


FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
FILES += sorted((DOCS / "reference").glob("*.md"))


def test_links_are_valid():
    for file in FILES:
        for link in re.findall(r"\]\(([^)]+)\)", file.read_text()):
            if "://" in link:
                continue
            path, _, section = link.partition("#")
            page = file if not path else file.parent / path
            assert page.exists(), link
            if section:
                titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
                anchors = {
                    re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in titles
                }
                assert section in anchors, link


EXAMPLES = [ROOT / "README.md", DOCS / "tutorial.md", *sorted((DOCS / "reference").glob("*.md"))]
EXAMPLES = [file for file in EXAMPLES if "```python" in file.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_examples_of_a_page_run_one_after_the_other(file):
    blocks = re.findall(r"^```python\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)
    ended = forked.run(program="\n".join(blocks))
    assert ended.returncode == 0, ended.stderr


def test_front_page_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 8_000


def commands_of(text):
    """The words of every ``$ draftwise …`` in the blocks of a page."""
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    starts = (line.split(" # ")[0].split() for line in lines if line.startswith("$ draftwise "))
    return [words[2:] for words in starts]


def test_commands_and_options_of_the_pages_exist():
    known = dict(walk("draftwise", typer.main.get_command(app)))
    num_checked = 0
    for file in FILES:
        for words in commands_of(file.read_text()):
            name = "draftwise"
            while words and f"{name} {words[0]}" in known:
                name = f"{name} {words.pop(0)}"
            assert name != "draftwise" or words[0].startswith("--"), (file.name, words)
            if name == "draftwise vllm-serve":  # it passes options on to vLLM
                continue
            options = {each for option in known[name].params for each in option.opts}
            options |= {each for option in known[name].params for each in option.secondary_opts}
            given = {word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
            assert given <= options | {"--help"}, (file.name, name)
            num_checked += 1
    assert num_checked > 50


def test_reference_has_every_public_class_and_error():
    text = "".join(file.read_text() for file in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for name in draftwise.__all__:
        assert f"{getattr(draftwise, name).__module__}.{name}" in documented
    assert "draftwise.errors" in documented


@pytest.fixture
def site_hook(monkeypatch):
    """Loads a hook of the site without mkdocs, which only names types there."""
    for name, members in {
        "mkdocs.config.defaults": ["MkDocsConfig"],
        "mkdocs.structure.files": ["Files"],
        "mkdocs.structure.pages": ["Page"],
    }.items():
        stand_in = types.ModuleType(name)
        vars(stand_in).update(dict.fromkeys(members))
        monkeypatch.setitem(sys.modules, name, stand_in)

    def load(name):
        file = ROOT / "tools" / "docs_site" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def walk(name, command):
    yield name, command
    for each, subcommand in getattr(command, "commands", {}).items():
        yield from walk(f"{name} {each}", subcommand)


def test_reference_of_the_command_line_has_every_command_and_option(site_hook):
    page = (DOCS / "reference" / "command_line.md").read_text()
    config = types.SimpleNamespace(docs_dir=str(DOCS))
    written = site_hook("command_line").on_page_markdown(page, None, config, None)
    sections = dict(re.findall(r"^## `([^`]+)`\n(.*?)(?=^## |\Z)", written, re.M | re.S))
    commands = dict(walk("draftwise", typer.main.get_command(app)))
    assert list(sections) == list(commands)
    for name, command in commands.items():
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                assert f"`{option.opts[-1]}`" in sections[name], (name, option.name)
