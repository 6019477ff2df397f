"""``draftwise train``: make a draft, or a companion, for a target."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwise.cli.fields import takes
from draftwise.cli.flags import FlaggingCommand
from draftwise.cli.option_values import parse_numbers
from draftwise.cli.options import MODELS, RUNNING
from draftwise.cli.train_blocks import BLOCK_OPTIONS, BlockOptions
from draftwise.cli.train_options import COMMON_OPTIONS, METHOD, CommonOptions
from draftwise.errors import InvalidParameterError

train = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Train a draft or a companion for a target, from the target's own answers.",
)


@train.callback()
def _root() -> None:
    """Train a draft or a companion for a target, from the target's own answers to your prompts."""


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS)
def eagle3(
    common: CommonOptions,
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
    num_steps: Annotated[
        int,
        typer.Option(
            "--steps",
            help="Number of tokens that the head drafts in a row during training.",
            rich_help_panel=METHOD,
        ),
    ] = 4,
    state_gib: Annotated[
        float,
        typer.Option(
            help="Memory for hidden states that are read again in the next epoch, in GiB.",
            rich_help_panel=RUNNING,
        ),
    ] = 2.0,
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
    common.run(
        "eagle3",
        draft_vocab=8192 if draft_vocab is None else draft_vocab,
        layers=None if layers is None else tuple(parse_numbers("layers", layers)),
        num_steps=num_steps,
        state_gib=state_gib,
        start_from=start_from,
    )


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS.but(loss="kl"))
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
@takes(common=COMMON_OPTIONS.but(loss="kl"))
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
@takes(common=COMMON_OPTIONS)
def mtp(
    common: CommonOptions,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--continue",
            help="Folder of an MTP layer to train further.",
            metavar="LAYER",
            show_default="the target's own, otherwise a new one",
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_steps: Annotated[
        int,
        typer.Option(
            "--steps",
            help="Number of tokens that the layer drafts in a row during training.",
            rich_help_panel=METHOD,
        ),
    ] = 4,
    state_gib: Annotated[
        float,
        typer.Option(
            help="Memory for hidden states that are read again in the next epoch, in GiB.",
            rich_help_panel=RUNNING,
        ),
    ] = 2.0,
) -> None:
    """Train the MTP layer of a target, or a new one for a target without one.

    The target stays as it is, and the trained layer is written to a folder of its own. Targets are
    dense models of Qwen3.5.

    Examples:
      draftwise train mtp --target zoo:hybrid --prompts chat.jsonl -o layer --minutes 10
      draftwise generate --target zoo:hybrid --draft layer --prompts chat.jsonl
    """
    common.run("mtp", num_steps=num_steps, state_gib=state_gib, start_from=start_from)


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS.but(loss="tokens"), blocks=BLOCK_OPTIONS)
def dflash(common: CommonOptions, blocks: BlockOptions) -> None:
    """Train a DFlash head, which predicts all tokens of a draft in one pass.

    It learns the tokens of the answers (--loss tokens), the target's distributions by one of the
    other losses, or a mixture of both (--loss dspark). A block predicts one token fewer than it has
    rows.

    Examples:
      draftwise train dflash --target zoo:target --prompts chat.jsonl -o head --minutes 10
    """
    common.run("dflash", **blocks.own())


@train.command(cls=FlaggingCommand)
@takes(common=COMMON_OPTIONS.but(loss="dspark"), blocks=BLOCK_OPTIONS.but(block_size=7))
def dspark(
    common: CommonOptions,
    blocks: BlockOptions,
    markov: Annotated[
        str,
        typer.Option(
            help="Kind of the Markov head: vanilla, gated or rnn.", rich_help_panel=METHOD
        ),
    ] = "vanilla",
    markov_rank: Annotated[
        int, typer.Option("--rank", help="Rank of the Markov head.", rich_help_panel=METHOD)
    ] = 256,
) -> None:
    """Train a DSpark head, a DFlash head in which each token depends on the one before.

    Its confidence head estimates whether the next token will be accepted. It is calibrated on the
    held-out answers.

    Examples:
      draftwise train dspark --target zoo:target --prompts chat.jsonl -o head --minutes 10
    """
    common.run("dspark", **blocks.own(), markov=markov, markov_rank=markov_rank)
