"""``draftwise train``: make a draft for a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftwise.cli.common_options import (
    MODELS,
    RUNNING,
    TARGET_HELP,
    Device,
    Dtype,
    TrustRemoteCode,
)
from draftwise.cli.flags import FlaggingCommand
from draftwise.cli.option_values import make_folder, parse_numbers, set_threads
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.distillation.settings import TrainingSettings

train = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Train a draft for a target, from the target's own answers to your prompts.",
)

DATA, LENGTH, METHOD = "Data", "Length of the run", "Method"
_DEFAULT_MINUTES = 60.0


@train.callback()
def _root() -> None:
    """Train a draft for a target, from the target's own answers to your prompts."""


@train.command(cls=FlaggingCommand)
def eagle3(
    prompts: Annotated[
        list[Path],
        typer.Option(
            help="JSON lines with prompt, question, turns or text; may be repeated.",
            metavar="FILE",
            rich_help_panel=DATA,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the head.", metavar="DIR")
    ],
    target: Annotated[
        str, typer.Option(help=TARGET_HELP.partition(";")[0] + ".", rich_help_panel=MODELS)
    ] = "zoo:target",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Texts to train on beside the answers: JSON lines, text, or a folder; may be "
            "repeated.",
            metavar="PATH",
            rich_help_panel=DATA,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--plain",
            help="Format prompts with the target's chat template.",
            show_default="chat where the target has a template",
            rich_help_panel=DATA,
        ),
    ] = None,
    temperatures: Annotated[
        str,
        typer.Option(
            help="Temperatures that will be served, separated by commas.", rich_help_panel=DATA
        ),
    ] = "0,1",
    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens of an answer.", rich_help_panel=DATA)
    ] = 256,
    length: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens of a prompt and its answer together.",
            rich_help_panel=DATA,
        ),
    ] = 512,
    held_out: Annotated[
        int, typer.Option(help="Number of prompts kept for evaluation.", rich_help_panel=DATA)
    ] = 32,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the target's answers, kept for later runs.",
            show_default="the user's cache folder",
            metavar="DIR",
            rich_help_panel=DATA,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time for answers and training together.",
            show_default="60 without --tokens",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Training tokens, repetitions included, instead of --minutes.",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the unfinished run of the output folder.",
            rich_help_panel=LENGTH,
        ),
    ] = False,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--continue",
            help="Folder of a head to train further.",
            metavar="HEAD",
            rich_help_panel=MODELS,
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens that the head can propose.",
            show_default="8192",
            rich_help_panel=METHOD,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Hidden states that the head reads, separated by commas; 2 is the input of the "
            "target's layer 2.",
            show_default="2, L // 2, L - 3 of L layers",
            rich_help_panel=METHOD,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Steps of training-time test.", rich_help_panel=METHOD)
    ] = 4,
    loss: Annotated[
        str,
        typer.Option(help="cross-entropy, kl, total-variation or mixed.", rich_help_panel=METHOD),
    ] = "cross-entropy",
    learning_rate: Annotated[
        float, typer.Option(help="Peak learning rate.", rich_help_panel=METHOD)
    ] = 3e-3,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens per optimiser step.",
            show_default="2048, or 4096 in runs of hours",
            rich_help_panel=METHOD,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    state_gib: Annotated[
        float,
        typer.Option(
            help="Memory for hidden states that are read again in the next epoch, in GiB.",
            rich_help_panel=RUNNING,
        ),
    ] = 2.0,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Number of CPU threads.", show_default="PyTorch's default", rich_help_panel=RUNNING
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train an EAGLE-3 head, which reads hidden states of the target.

    The target answers the prompts first, for at most 30 % of the time. Answers are kept for later
    runs. The head is then trained on them, and measured on held-out prompts every few minutes.
    ctrl-C ends a run after a checkpoint.

    Examples:
      draftwise train eagle3 --target zoo:target --prompts prompts.jsonl -o head --minutes 10
      draftwise train eagle3 --target zoo:target --prompts prompts.jsonl -o head --resume
      draftwise train eagle3 --prompts law.jsonl --continue head -o law-head --minutes 10
    """
    from draftwise.distillation.settings import TrainingSettings

    if minutes is not None and tokens is not None:
        raise InvalidParameterError("minutes", "give either --minutes or --tokens")
    if start_from is not None:
        for name, value in (("draft_vocab", draft_vocab), ("layers", layers)):
            if value is not None:
                raise InvalidParameterError(name, "is that of the head given with --continue")
    for name, paths in (("prompts", prompts), ("text", text or [])):
        for path in paths:
            if not path.exists():
                raise InvalidParameterError(name, f"there is no file {str(path)!r}")
    settings = TrainingSettings(
        target=target,
        prompts=tuple(str(path.absolute()) for path in prompts),
        texts=tuple(str(path.absolute()) for path in text or ()),
        chat=chat,
        minutes=_DEFAULT_MINUTES if minutes is None and tokens is None else minutes,
        tokens=tokens,
        temperatures=_temperatures(temperatures),
        max_tokens=max_tokens,
        length=length,
        num_held_out=held_out,
        draft_vocab=8192 if draft_vocab is None else draft_vocab,
        layers=None if layers is None else tuple(parse_numbers("layers", layers)),
        num_steps=steps,
        loss=loss,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        state_gib=state_gib,
        seed=seed,
        start_from=start_from,
    )
    if threads is not None:
        set_threads(threads)
    make_folder(output)
    _run(settings, output, dtype, device, trust_remote_code, answers, resume)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(each) for each in text.split(",")))
    except ValueError:
        raise InvalidParameterError(
            "temperatures", f"must be numbers separated by commas, got {text!r}"
        ) from None


def _run(
    settings: TrainingSettings,
    output: Path,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    answers: Path | None,
    resume: bool,
) -> None:
    from draftwise.cli.interruption import EXIT_STATUS, interruptible
    from draftwise.cli.train_report import LearningCurve
    from draftwise.distillation.eagle3 import HeadTraining, Machine, Reporting

    console = Console(highlight=False)
    curve = LearningCurve(console)
    with interruptible() as interruption:
        machine = Machine(dtype, device, trust_remote_code, answers)

        def on_status(text: str) -> None:
            interruption.check()
            curve.status(text)

        reporting = Reporting(on_status, curve.record, interruption.check)
        try:
            with curve.shown():
                training = HeadTraining(settings, output, machine, reporting, resume)
                curve.begin(training.facts)
                values = training.run()
        except KeyboardInterrupt:
            console.print(f"interrupted; go on with [bold]--resume -o {output}[/]", soft_wrap=True)
            raise typer.Exit(EXIT_STATUS) from None
    curve.end(values)
    console.print(f"written to {output}", soft_wrap=True)
