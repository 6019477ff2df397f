"""``draftwise train``: make a draft for a target."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwise.cli.common_options import MODELS, RUNNING, Device, Dtype, TrustRemoteCode
from draftwise.cli.flags import FlaggingCommand
from draftwise.cli.option_values import parse_numbers
from draftwise.cli.train_options import (
    METHOD,
    Answers,
    BatchTokens,
    Chat,
    CommonOptions,
    HeldOut,
    LearningRate,
    Length,
    LossName,
    MaxTokens,
    Minutes,
    Output,
    Prompts,
    Resume,
    Seed,
    Target,
    Temperatures,
    Text,
    Threads,
    Tokens,
)
from draftwise.errors import InvalidParameterError

train = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Train a draft for a target, from the target's own answers to your prompts.",
)


@train.callback()
def _root() -> None:
    """Train a draft for a target, from the target's own answers to your prompts."""


@train.command(cls=FlaggingCommand)
def eagle3(
    context: typer.Context,
    prompts: Prompts,
    output: Output,
    target: Target = "zoo:target",
    text: Text = None,
    chat: Chat = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    length: Length = 512,
    held_out: HeldOut = 32,
    answers: Answers = None,
    minutes: Minutes = None,
    tokens: Tokens = None,
    resume: Resume = False,
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
        int,
        typer.Option(
            help="Number of tokens that the head drafts in a row during training.",
            rich_help_panel=METHOD,
        ),
    ] = 4,
    loss: LossName = "mixed",
    learning_rate: LearningRate = 3e-3,
    batch_tokens: BatchTokens = None,
    seed: Seed = 0,
    state_gib: Annotated[
        float,
        typer.Option(
            help="Memory for hidden states that are read again in the next epoch, in GiB.",
            rich_help_panel=RUNNING,
        ),
    ] = 2.0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train an EAGLE-3 head, which reads hidden states of the target.

    The target answers the prompts first, for at most 30 % of --minutes. Answers are kept for later
    runs. The head is then trained on them, and measured on held-out prompts every few minutes.
    ctrl-C ends the training after a checkpoint; the same command with --resume goes on with it.

    Examples:
      draftwise train eagle3 --target zoo:target --prompts chat.jsonl -o head --minutes 10
      draftwise train eagle3 --target zoo:target --prompts chat.jsonl -o head --minutes 10 --resume
      draftwise train eagle3 --prompts law.jsonl --continue head -o law-head --minutes 10
    """
    if start_from is not None:
        for name, value in (("draft_vocab", draft_vocab), ("layers", layers)):
            if value is not None:
                raise InvalidParameterError(name, "is that of the head given with --continue")
    common = CommonOptions.of(context)
    settings = common.settings(
        kind="eagle3",
        draft_vocab=8192 if draft_vocab is None else draft_vocab,
        layers=None if layers is None else tuple(parse_numbers("layers", layers)),
        num_steps=steps,
        state_gib=state_gib,
        start_from=start_from,
    )

    from draftwise.distillation.eagle3 import Eagle3Recipe

    common.run(settings, Eagle3Recipe(settings))


@train.command(cls=FlaggingCommand)
def model(
    context: typer.Context,
    prompts: Prompts,
    output: Output,
    target: Target = "zoo:target",
    num_layers: Annotated[
        int, typer.Option(help="Layers of the draft.", rich_help_panel=MODELS)
    ] = 2,
    hidden_size: Annotated[
        int, typer.Option(help="Hidden size of the draft.", rich_help_panel=MODELS)
    ] = 128,
    text: Text = None,
    chat: Chat = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    length: Length = 512,
    held_out: HeldOut = 32,
    answers: Answers = None,
    minutes: Minutes = None,
    tokens: Tokens = None,
    resume: Resume = False,
    loss: LossName = "kl",
    learning_rate: LearningRate = 3e-3,
    batch_tokens: BatchTokens = None,
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a small Llama with the vocabulary of the target.

    It learns the target's whole distribution at every position of the target's answers. With a
    large vocabulary, an EAGLE-3 head is much cheaper to train and to run.

    Examples:
      draftwise train model --prompts prompts.jsonl -o draft --num-layers 2 --hidden-size 128
    """
    common = CommonOptions.of(context)
    settings = common.settings(kind="model", num_layers=num_layers, hidden_size=hidden_size)

    from draftwise.distillation.model import ModelRecipe

    common.run(settings, ModelRecipe(settings, trust_remote_code))


@train.command(name="exit", cls=FlaggingCommand)
def exit_(
    context: typer.Context,
    prompts: Prompts,
    output: Output,
    exit_after: Annotated[
        int,
        typer.Option(
            "--exit",
            help="Number of the target's layers before the exit.",
            metavar="N",
            rich_help_panel=MODELS,
        ),
    ],
    target: Target = "zoo:target",
    rank: Annotated[int, typer.Option(help="Rank of the adapter.", rich_help_panel=MODELS)] = 64,
    text: Text = None,
    chat: Chat = None,
    temperatures: Temperatures = "0,1",
    max_tokens: MaxTokens = 256,
    length: Length = 512,
    held_out: HeldOut = 32,
    answers: Answers = None,
    minutes: Minutes = None,
    tokens: Tokens = None,
    resume: Resume = False,
    loss: LossName = "mixed",
    learning_rate: LearningRate = 3e-3,
    batch_tokens: BatchTokens = None,
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train the adapter of an early exit: the target's first layers draft.

    The target stays as it is. The adapter is a small map from the state at the exit to what the
    target's final norm and head expect.

    Examples:
      draftwise train exit --exit 3 --prompts prompts.jsonl -o exit --minutes 10
    """
    common = CommonOptions.of(context)
    settings = common.settings(kind="exit", exit=exit_after, adapter_rank=rank)

    from draftwise.distillation.exit import ExitRecipe

    common.run(settings, ExitRecipe(settings))
