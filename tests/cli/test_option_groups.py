"""Groups of options that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from draftwise.cli.app import app
from draftwise.cli.option_groups import takes_group

HELP = {"where": "A folder.", "number": "A number.", "files": "Files."}


@dataclass(frozen=True)
class Shared:
    where: Annotated[Path, typer.Option("--where", "-w", help=HELP["where"])]
    number: Annotated[int, typer.Option(help=HELP["number"])] = 3
    files: Annotated[list[Path] | None, typer.Option(help=HELP["files"])] = None


@pytest.fixture
def run():
    """Run one of two commands with the same group; returns what they were called with."""
    calls = []
    inner = typer.Typer()

    @inner.command()
    @takes_group(Shared)
    def first(shared: Shared, own: Annotated[str, typer.Option()], flag: bool = False) -> None:
        """The first command."""
        calls.append((shared, own, flag))

    @inner.command()
    @takes_group(Shared, number=5)
    def second(shared: Shared) -> None:
        calls.append(shared)

    def command(*arguments):
        calls.clear()
        result = CliRunner().invoke(inner, arguments)
        return result.exit_code, result.output, calls

    command.app = inner
    return command


def test_a_command_gets_the_group_and_its_own_options(run):
    given = ("--where=a", "--files=b", "--files=c", "--own=x", "--flag")
    assert run("first", *given)[2] == [(Shared(Path("a"), 3, [Path("b"), Path("c")]), "x", True)]
    assert run("first", "-w", "a", "--own=x", "--number=7")[2] == [
        (Shared(Path("a"), 7), "x", False)
    ]


def test_a_command_may_have_other_defaults(run):
    assert run("second", "--where=a")[2] == [Shared(Path("a"), 5)]


def test_options_without_defaults_are_required(run):
    for arguments in (("--own=x",), ("--where=a",)):
        status, output, calls = run("first", *arguments)
        assert (status, calls) == (2, [])
        assert "Missing option" in output


def test_the_help_has_all_options_and_the_text_of_the_command(run):
    commands = get_command(run.app).commands
    assert commands["first"].help == "The first command."
    options = {option.name: option.help for option in commands["first"].params}
    assert {name: options[name] for name in HELP} == HELP
    assert list(options)[:5] == [*HELP, "own", "flag"]


def test_other_defaults_must_be_those_of_an_option():
    with pytest.raises(TypeError, match="Shared has no option 'size'"):
        takes_group(Shared, size=1)


def test_what_is_trained_does_not_change_the_common_options():
    commands = get_command(app).commands["train"].commands
    assert set(commands) == {"eagle3", "model", "companion", "exit"}
    options = [
        {
            option.name: (option.opts, option.help, option.required)
            for option in command.params
            if option.name not in ("draft", "num_layers", "hidden_size")
        }
        for command in commands.values()
    ]
    common = set.intersection(*map(set, options))
    assert {"prompts", "output", "minutes", "resume", "loss", "seed", "device"} <= common
    for name in common:
        assert len({str(each[name]) for each in options}) == 1
