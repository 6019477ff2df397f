"""Entry point of the command line. Errors are printed as one line and exit with status 2."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import draftwise
from draftwise.cli.audit import audit
from draftwise.cli.benchmark import benchmark
from draftwise.cli.chat import chat
from draftwise.cli.flags import FlaggingCommand
from draftwise.cli.generate import generate
from draftwise.cli.policies import policies
from draftwise.cli.profile import profile
from draftwise.cli.profile_latency import profile_latency
from draftwise.cli.quiet import only_our_warnings
from draftwise.cli.serve import serve
from draftwise.cli.study import study
from draftwise.cli.train import train
from draftwise.cli.vllm_serve import vllm_serve
from draftwise.errors import DraftwiseError
from draftwise.processes import end_quickly

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"draftwise {draftwise.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Lossless speculative decoding: the same text, sooner."""


app.command(cls=FlaggingCommand)(generate)
app.command(cls=FlaggingCommand)(policies)
app.command(cls=FlaggingCommand)(profile)
app.command(cls=FlaggingCommand)(profile_latency)
app.command(cls=FlaggingCommand)(benchmark)
app.command(cls=FlaggingCommand)(audit)
app.command(cls=FlaggingCommand)(study)
app.add_typer(train, name="train")
app.command(cls=FlaggingCommand)(serve)
app.command(cls=FlaggingCommand)(chat)
# Arguments after -- are passed on to vllm.
app.command(cls=FlaggingCommand, context_settings={"allow_extra_args": True})(vllm_serve)


def _exit(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line; a :class:`DraftwiseError` is printed as one line, with exit status 2.

    SIGTERM is handled like ctrl-C, so that child processes are ended too.
    """
    end_quickly()
    previous_handler = signal.signal(signal.SIGTERM, _exit)
    try:
        with only_our_warnings() as shown_warnings:
            app(obj=shown_warnings)
    except DraftwiseError as error:
        Console(stderr=True).print(f"[bold red]error[/] [bold]{error.field}[/]: ", end="")
        print(error.message, file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
