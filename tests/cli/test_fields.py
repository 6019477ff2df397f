"""Options of commands that dataclasses declare."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from draftwise.cli.app import app
from draftwise.cli.fields import Group, Own, Values, takes


@dataclass(frozen=True)
class Shared:
    """What two commands share.

    Attributes:
        where: a folder, or a file
            of ``draftwise profile``. It must exist.
        number: ``"few"`` or more; ``None`` for as many
            as there are.
        files: some files.
        loud: say everything.
        careful: check the files.
        limits: a limit of its own.
        hidden: no option.
    """

    where: Path
    number: int | None = None
    files: tuple[Path, ...] = ()
    loud: bool = False
    careful: bool = True
    limits: dict[str, int] = field(default_factory=dict)
    hidden: object = None


OPTIONS = Group(
    Shared,
    "Panel",
    {
        "where": Own(flag="--where,-w"),
        "number": Own(),
        "files": Own(kind=list[Path], metavar="FILE"),
        "loud": Own(),
        "careful": Own(panel="Other"),
        "limits": Own("A limit.", "--limit", list[str], lambda given: dict.fromkeys(given, 1)),
    },
)


@pytest.fixture
def run():
    """Run one of two commands with the same group; returns what they were called with."""
    calls = []
    inner = typer.Typer()

    @inner.command()
    @takes(shared=OPTIONS)
    def first(own: Annotated[str, typer.Option()], *, shared: Shared, flag: bool = False) -> None:
        """The first command."""
        calls.append((own, shared, flag))

    @inner.command()
    @takes(shared=OPTIONS.only("number", "where").but(number=5))
    def second(shared: Values) -> None:
        calls.append(shared)

    def command(*arguments):
        calls.clear()
        result = CliRunner().invoke(inner, arguments)
        return result.exit_code, result.output, calls

    command.app = inner
    return command


def test_a_command_gets_a_filled_object_or_what_was_typed(run):
    given = ("--where=a", "--files=b", "--files=c", "--own=x", "--flag", "--limit=d")
    filled = Shared(Path("a"), None, (Path("b"), Path("c")), limits={"d": 1})
    assert run("first", *given)[2] == [("x", filled, True)]
    given = ("-w", "a", "--own=x", "--number=7", "--loud", "--no-careful")
    assert run("first", *given)[2] == [("x", Shared(Path("a"), 7, (), True, False), False)]
    assert run("second", "--where=a")[2] == [{"number": 5, "where": Path("a")}]


def test_options_without_defaults_are_required(run):
    for arguments in (("--where=a",), ("--own=x",)):
        status, output, calls = run("first", *arguments)
        assert (status, calls) == (2, [])
        assert "Missing option" in output


def test_the_help_is_in_the_documentation_of_the_fields(run):
    command = get_command(run.app).commands["first"]
    assert command.help == "The first command."
    options = {option.name: option for option in command.params}
    assert list(options) == ["own", *OPTIONS.own, "flag"]
    assert {name: options[name].help for name in OPTIONS.own} == {
        "where": "A folder, or a file of `draftwise profile`.",
        "number": "few or more.",
        "files": "Some files; may be repeated.",
        "loud": "Say everything.",
        "careful": "Check the files.",
        "limits": "A limit.",
    }
    assert options["number"].show_default == "as many as there are"
    assert options["loud"].secondary_opts == []
    panels = [options[name].rich_help_panel for name in OPTIONS.own]
    assert panels == ["Panel"] * 4 + ["Other", "Panel"]


def test_mistakes_in_a_group_are_found_when_the_command_is_made():
    with pytest.raises(TypeError, match="Shared has no option 'size'"):
        OPTIONS.but(size=1)
    with pytest.raises(TypeError, match="the option 'hidden' needs a type of its own"):
        takes(shared=Group(Shared, "Panel", {"hidden": Own()}))(lambda shared: None)


def test_every_option_has_a_help_text():
    commands = dict(get_command(app).commands)
    commands |= commands.pop("train").commands
    for name, command in commands.items():
        for option in command.params:
            assert option.help or option.name in ("help", "host", "port"), (name, option.name)


def test_what_is_trained_does_not_change_the_common_options():
    commands = get_command(app).commands["train"].commands
    assert commands.pop("best").hidden
    assert set(commands) == {"eagle3", "model", "companion", "exit", "mtp", "dflash", "dspark"}
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
