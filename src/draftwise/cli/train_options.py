"""Options of all commands of ``draftwise train``, and how they are run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftwise.cli.common_options import MODELS, RUNNING, Device, Dtype, TrustRemoteCode
from draftwise.cli.option_values import make_folder, parse_temperatures, set_threads
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.distillation.settings import TrainingSettings

DATA, LENGTH, METHOD = "Data", "Length of the run", "Method"
_DEFAULT_MINUTES = 60.0

Prompts = Annotated[
    list[Path],
    typer.Option(
        help="JSON lines with prompt, question, turns or text; may be repeated.",
        metavar="FILE",
        rich_help_panel=DATA,
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write.", metavar="DIR")]
Target = Annotated[str, typer.Option(help="Folder, hub id or zoo:NAME.", rich_help_panel=MODELS)]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        help="Texts to train on beside the answers: JSON lines, text, or a folder; may be "
        "repeated.",
        metavar="PATH",
        rich_help_panel=DATA,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--plain",
        help="Format prompts with the target's chat template.",
        show_default="chat where the target has a template",
        rich_help_panel=DATA,
    ),
]
Temperatures = Annotated[
    str,
    typer.Option(
        help="Temperatures that will be served, separated by commas.", rich_help_panel=DATA
    ),
]
MaxTokens = Annotated[
    int, typer.Option(help="Maximum number of tokens of an answer.", rich_help_panel=DATA)
]
Length = Annotated[
    int,
    typer.Option(
        help="Maximum number of tokens of a prompt and its answer together.", rich_help_panel=DATA
    ),
]
HeldOut = Annotated[
    int,
    typer.Option(
        help="Number of prompts kept for evaluation, at most a tenth of them.",
        rich_help_panel=DATA,
    ),
]
Answers = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the target's answers, kept for later runs.",
        show_default="the user's cache folder",
        metavar="DIR",
        rich_help_panel=DATA,
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Time for answers and training together.",
        show_default="60 without --tokens",
        rich_help_panel=LENGTH,
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        help="Training tokens, repetitions included, instead of --minutes.", rich_help_panel=LENGTH
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the unfinished run of the output folder. All other options must be "
        "repeated.",
        rich_help_panel=LENGTH,
    ),
]
LossName = Annotated[
    str,
    typer.Option(help="cross-entropy, kl, total-variation or mixed.", rich_help_panel=METHOD),
]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.", rich_help_panel=METHOD)]
BatchTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens per optimiser step.",
        show_default="512, 1024 or 2048 by the length of the run",
        rich_help_panel=METHOD,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Number of CPU threads.", show_default="PyTorch's default", rich_help_panel=RUNNING
    ),
]


@dataclass(frozen=True)
class CommonOptions:
    """Options of all commands of ``draftwise train``; see :func:`takes_group`."""

    prompts: Prompts
    output: Output
    target: Target = "zoo:target"
    text: Text = None
    chat: Chat = None
    temperatures: Temperatures = "0,1"
    max_tokens: MaxTokens = 256
    length: Length = 512
    held_out: HeldOut = 32
    answers: Answers = None
    minutes: Minutes = None
    tokens: Tokens = None
    resume: Resume = False
    loss: LossName = "mixed"
    learning_rate: LearningRate = 3e-3
    batch_tokens: BatchTokens = None
    seed: Seed = 0
    threads: Threads = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False

    def settings(self, kind: str, **own: Any) -> TrainingSettings:
        """Settings of a run.

        Args:
            kind: what is trained, a key of :data:`draftwise.distillation.recipes.RECIPES`.
            own: the settings that this kind alone has.

        Raises:
            InvalidParameterError: an option is invalid, or a file does not exist.
        """
        from draftwise.distillation.settings import TrainingSettings

        if self.minutes is not None and self.tokens is not None:
            raise InvalidParameterError("minutes", "give either --minutes or --tokens")
        texts = self.text or []
        for name, paths in (("prompts", self.prompts), ("text", texts)):
            for path in paths:
                if not path.exists():
                    raise InvalidParameterError(name, f"there is no file {str(path)!r}")
        default = _DEFAULT_MINUTES if self.tokens is None else None
        return TrainingSettings(
            kind=kind,
            target=self.target,
            prompts=tuple(str(path.absolute()) for path in self.prompts),
            texts=tuple(str(path.absolute()) for path in texts),
            chat=self.chat,
            minutes=default if self.minutes is None else self.minutes,
            tokens=self.tokens,
            temperatures=tuple(parse_temperatures("temperatures", self.temperatures)),
            max_tokens=self.max_tokens,
            length=self.length,
            num_held_out=self.held_out,
            loss=self.loss,
            learning_rate=self.learning_rate,
            batch_tokens=self.batch_tokens,
            seed=self.seed,
            **own,
        )

    def run(
        self, kind: str, to_go_on: str = "repeat the command with [bold]--resume[/]", **own: Any
    ) -> None:
        """Train, and show the learning curve.

        Args:
            kind: see :meth:`settings`.
            to_go_on: what to do after an interruption.
            own: see :meth:`settings`.

        Raises:
            DraftwiseError: an option, the target or a named draft is invalid.
        """
        from draftwise.cli.interruption import EXIT_STATUS, interruptible
        from draftwise.cli.train_report import LearningCurve
        from draftwise.distillation.recipes import recipe_of
        from draftwise.distillation.run import Machine, Reporting, TrainingRun, is_unfinished

        settings = self.settings(kind, **own)
        recipe = recipe_of(settings, self.trust_remote_code)
        if self.threads is not None:
            set_threads(self.threads)
        make_folder(self.output)
        console = Console(highlight=False)
        curve = LearningCurve(console)
        machine = Machine(self.dtype, self.device, self.trust_remote_code, self.answers)
        with interruptible() as interruption:

            def on_status(text: str) -> None:
                interruption.check()
                curve.status(text)

            reporting = Reporting(on_status, curve.record, interruption.check)
            try:
                with curve.shown():
                    training = TrainingRun(
                        settings, recipe, self.output, machine, reporting, self.resume
                    )
                    curve.begin(training.facts)
                    values = training.run()
            except KeyboardInterrupt:
                hint = "run the command again; answers are kept"
                if is_unfinished(self.output):
                    hint = f"to go on, {to_go_on}"
                console.print(f"interrupted; {hint}", soft_wrap=True)
                raise typer.Exit(EXIT_STATUS) from None
        curve.end(values)
        console.print(f"written to {self.output}", soft_wrap=True)
