"""Options of all commands of ``draftwise train``, and how they are run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from draftwise.cli.fields import Group, Own
from draftwise.cli.option_values import make_folder, parse_temperatures, set_threads
from draftwise.cli.options import MODELS, OPTIONS, RUNNING
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.distillation.settings import TrainingSettings

DATA, LENGTH, METHOD = "Data", "Length of the run", "Method"
_DEFAULT_MINUTES = 60.0
# Losses of kinds that do not have the default of all kinds.
DEFAULT_LOSSES = {"model": "kl", "companion": "kl", "dflash": "tokens", "dspark": "dspark"}


@dataclass(frozen=True)
class CommonOptions:
    """Options of all commands of ``draftwise train``.

    Attributes:
        prompts: JSON lines with prompt, question, turns or text.
        output: folder to write.
        target: folder, hub id or zoo:NAME.
        texts: texts to train on beside the answers: JSON lines, text, or a folder.
        chat: format prompts with the target's chat template; ``None`` for chat where the target has
            a template.
        temperatures: temperatures that will be served, separated by commas.
        max_tokens: maximum number of tokens of an answer.
        length: maximum number of tokens of a prompt and its answer together.
        num_held_out: number of prompts kept for evaluation, at most a tenth of them.
        answers: folder of the target's answers, kept for later runs; ``None`` for the user's cache
            folder.
        minutes: time for answers and training together; ``None`` for 60 without --tokens.
        tokens: training tokens, repetitions included, instead of --minutes.
        resume: go on with the unfinished run of the output folder. All other options must be
            repeated.
        loss: ``cross-entropy``, ``kl``, ``total-variation`` or ``mixed``; for heads that draft
            blocks also ``tokens`` or ``dspark``.
        learning_rate: peak learning rate.
        batch_tokens: tokens per optimiser step; ``None`` for 512, 1024 or 2048 by the length of the
            run.
        seed: seed of all random numbers.
        threads: number of CPU threads; ``None`` for PyTorch's default.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``.
        device: ``auto``, ``cpu`` or ``cuda``.
        trust_remote_code: allow models to run code from their repositories.
    """

    prompts: tuple[Path, ...]
    output: Path
    target: str = "zoo:target"
    texts: tuple[Path, ...] = ()
    chat: bool | None = None
    temperatures: str = "0,1"
    max_tokens: int = 256
    length: int = 512
    num_held_out: int = 32
    answers: Path | None = None
    minutes: float | None = None
    tokens: int | None = None
    resume: bool = False
    loss: str = "mixed"
    learning_rate: float = 3e-3
    batch_tokens: int | None = None
    seed: int = 0
    threads: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def settings(self, kind: str, **own: Any) -> TrainingSettings:
        """Settings of a run.

        Args:
            kind: what is trained, a key of :data:`draftwise.distillation.run.RECIPES`.
            own: the settings that this kind alone has.

        Raises:
            InvalidParameterError: an option is invalid, or a file does not exist.
        """
        from draftwise.distillation.settings import TrainingSettings

        if self.minutes is not None and self.tokens is not None:
            raise InvalidParameterError("minutes", "give either --minutes or --tokens")
        for name, paths in (("prompts", self.prompts), ("texts", self.texts)):
            for path in paths:
                if not path.exists():
                    raise InvalidParameterError(name, f"there is no file {str(path)!r}")
        default = _DEFAULT_MINUTES if self.tokens is None else None
        return TrainingSettings(
            kind=kind,
            target=self.target,
            prompts=tuple(str(path.absolute()) for path in self.prompts),
            texts=tuple(str(path.absolute()) for path in self.texts),
            chat=self.chat,
            minutes=default if self.minutes is None else self.minutes,
            tokens=self.tokens,
            temperatures=tuple(parse_temperatures("temperatures", self.temperatures)),
            max_tokens=self.max_tokens,
            length=self.length,
            num_held_out=self.num_held_out,
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
        from draftwise.distillation.run import Reporting, TrainingRun, is_unfinished, recipe_of
        from draftwise.distillation.settings import Machine

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


COMMON_OPTIONS = Group(
    CommonOptions,
    DATA,
    {
        "prompts": Own(kind=list[Path], metavar="FILE"),
        "output": Own(flag="--output,-o", metavar="DIR", panel=OPTIONS),
        "target": Own(panel=MODELS),
        "texts": Own(flag="--text", kind=list[Path], metavar="PATH"),
        "chat": Own(flag="--chat/--plain"),
        "temperatures": Own(),
        "max_tokens": Own(),
        "length": Own(),
        "num_held_out": Own(flag="--held-out"),
        "answers": Own(metavar="DIR"),
        "minutes": Own(panel=LENGTH),
        "tokens": Own(panel=LENGTH),
        "resume": Own(
            "Go on with the unfinished run of the output folder. All other options must be "
            "repeated.",
            panel=LENGTH,
        ),
        "loss": Own(panel=METHOD),
        "learning_rate": Own(panel=METHOD),
        "batch_tokens": Own(panel=METHOD),
        "seed": Own(panel=OPTIONS),
        **{
            name: Own(panel=RUNNING) for name in ("threads", "dtype", "device", "trust_remote_code")
        },
    },
)
