"""``draftwise train``: make a draft, or a companion, for a target."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from draftwise.cli.fields import takes
from draftwise.cli.flags import FlaggingCommand
from draftwise.cli.options import MODELS
from draftwise.cli.train_heads import (
    DFLASH_OPTIONS,
    DSPARK_OPTIONS,
    EAGLE3_OPTIONS,
    MTP_OPTIONS,
    settings_of,
)
from draftwise.cli.train_options import COMMON_OPTIONS, DEFAULT_LOSSES, CommonOptions
from draftwise.errors import InvalidParameterError

# What is run if the first argument is no kind.
_BEST = "best"


class _KindOrTarget(TyperGroup):
    """The kinds that are trained. Without one, the first argument is a target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [_BEST, *args]
        return super().parse_args(ctx, args)


train = typer.Typer(
    cls=_KindOrTarget,
    no_args_is_help=True,
    rich_markup_mode="rich",
    subcommand_metavar="KIND | TARGET",
    help="Train a draft or a companion for a target, from the target's own answers. With a target "
    "in place of a kind, the kind is chosen: `draftwise train TARGET --prompts FILE -o DIR`.",
)


@train.callback()
def _root() -> None:
    """Train a draft or a companion for a target, from the target's own answers to your prompts."""


@train.command(name=_BEST, cls=FlaggingCommand, hidden=True)
@takes(common=COMMON_OPTIONS.without("loss"))
def best(
    common: CommonOptions,
    named: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="The target, in place of --target."),
    ] = None,
) -> None:
    """Train the kind of draft that served this target best after as long a training.

    Examples:
      draftwise train zoo:target --prompts chat.jsonl -o head --minutes 10
    """
    from draftwise.distillation.choice import best_kind

    if named is not None:
        if common.target not in (named, CommonOptions.target):
            raise InvalidParameterError("target", f"{named!r} is named already")
        common = replace(common, target=named)
    choice = best_kind(common.target, common.trust_remote_code)
    typer.echo(f"training {choice.kind}: {choice.reason}")
    replace(common, loss=DEFAULT_LOSSES.get(choice.kind, CommonOptions.loss)).run(choice.kind)


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS, own=EAGLE3_OPTIONS)
def eagle3(common: CommonOptions, own: dict[str, Any]) -> None:
    """Train an EAGLE-3 head, which reads hidden states of the target.

    The target answers the prompts first, for at most 30 % of --minutes. Answers are kept for later
    runs. The head is then trained on them, and measured on held-out prompts every few minutes.
    ctrl-C ends the training after a checkpoint; the same command with --resume goes on with it.

    Examples:
      draftwise train eagle3 --target zoo:target --prompts chat.jsonl -o head --minutes 10
      draftwise train eagle3 --target zoo:target --prompts chat.jsonl -o head --minutes 10 --resume
      draftwise train eagle3 --prompts law.jsonl --continue head -o law-head --minutes 10
    """
    common.run("eagle3", **settings_of(own))


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS.but(loss=DEFAULT_LOSSES["model"]))
def model(
    common: CommonOptions,
    num_layers: Annotated[
        int, typer.Option(help="Layers of the draft.", rich_help_panel=MODELS)
    ] = 2,
    hidden_size: Annotated[
        int,
        typer.Option(help="Hidden size of the draft, a multiple of 64.", rich_help_panel=MODELS),
    ] = 128,
) -> None:
    """Train a small Llama with the vocabulary of the target.

    It learns the target's whole distribution at every position of the target's answers. With a
    large vocabulary, an EAGLE-3 head is much cheaper to train and to run.

    Examples:
      draftwise train model --prompts prompts.jsonl -o draft --num-layers 2 --hidden-size 128
    """
    common.run("model", num_layers=num_layers, hidden_size=hidden_size)


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS.but(loss=DEFAULT_LOSSES["companion"]))
def companion(
    common: CommonOptions,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft that the companion will score: a model, or an EAGLE-3 head. What the "
            "companion knows of its acceptance is measured.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of the companion.",
            show_default="as many as the draft model, otherwise 2",
            rich_help_panel=MODELS,
        ),
    ] = None,
    hidden_size: Annotated[
        int | None,
        typer.Option(
            help="Hidden size of the companion, a multiple of 64.",
            show_default="1.5 times the draft model's, otherwise 192",
            rich_help_panel=MODELS,
        ),
    ] = None,
) -> None:
    """Train a companion: a small Llama that scores the tokens of a draft.

    It learns the target's whole distribution, as a draft of `draftwise train model` does. It helps
    where it is closer to the target than the draft is, so it is larger, and has other weights and
    another order of the data to begin with. Repeat --target, --prompts, --chat or --plain,
    --held-out, --seed, --max-tokens and --length of the draft's run: the same prompts are then held
    out.

    Examples:
      draftwise train companion --prompts prompts.jsonl --draft draft -o companion --minutes 30
      draftwise generate --prompts prompts.jsonl --draft draft --companion companion
    """
    from draftwise.distillation.scored_draft import default_size

    layers, size = default_size(draft, common.trust_remote_code)
    common.run(
        "companion",
        draft=draft,
        num_layers=layers if num_layers is None else num_layers,
        hidden_size=size if hidden_size is None else hidden_size,
    )


@train.command(name="exit", cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS)
def exit_(
    common: CommonOptions,
    exit: Annotated[
        int,
        typer.Option(
            "--exit",
            help="Number of the target's layers before the exit.",
            metavar="N",
            rich_help_panel=MODELS,
        ),
    ],
    adapter_rank: Annotated[
        int, typer.Option("--rank", help="Rank of the adapter.", rich_help_panel=MODELS)
    ] = 64,
) -> None:
    """Train the adapter of an early exit: the target's first layers draft.

    The target stays as it is. The adapter is a small map from the state at the exit to what the
    target's final norm and head expect.

    Examples:
      draftwise train exit --exit 3 --prompts prompts.jsonl -o exit --minutes 10
    """
    common.run("exit", exit=exit, adapter_rank=adapter_rank)


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS, own=MTP_OPTIONS)
def mtp(common: CommonOptions, own: dict[str, Any]) -> None:
    """Train the MTP layer of a target, or a new one for a target without one.

    The target stays as it is, and the trained layer is written to a folder of its own. Targets are
    dense models of Qwen3.5.

    Examples:
      draftwise train mtp --target zoo:hybrid --prompts chat.jsonl -o layer --minutes 10
      draftwise generate --target zoo:hybrid --draft layer --prompts chat.jsonl
    """
    common.run("mtp", **settings_of(own))


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS.but(loss=DEFAULT_LOSSES["dflash"]), own=DFLASH_OPTIONS)
def dflash(common: CommonOptions, own: dict[str, Any]) -> None:
    """Train a DFlash head, which predicts all tokens of a draft in one pass.

    It learns the tokens of the answers (--loss tokens), the target's distributions by one of the
    other losses, or a mixture of both (--loss dspark). A block predicts one token fewer than it has
    rows.

    Examples:
      draftwise train dflash --target zoo:target --prompts chat.jsonl -o head --minutes 10
    """
    common.run("dflash", **settings_of(own))


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS.but(loss=DEFAULT_LOSSES["dspark"]), own=DSPARK_OPTIONS)
def dspark(common: CommonOptions, own: dict[str, Any]) -> None:
    """Train a DSpark head, a DFlash head in which each token depends on the one before.

    Its confidence head estimates whether the next token will be accepted. It is calibrated on the
    held-out answers.

    Examples:
      draftwise train dspark --target zoo:target --prompts chat.jsonl -o head --minutes 10
    """
    common.run("dspark", **settings_of(own))
