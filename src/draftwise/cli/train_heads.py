"""Options of the commands of ``draftwise train`` that train heads and MTP layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftwise.cli.fields import Group, Own
from draftwise.cli.option_values import parse_numbers
from draftwise.cli.options import MODELS, RUNNING
from draftwise.cli.train_options import METHOD
from draftwise.errors import InvalidParameterError


@dataclass(frozen=True)
class HeadOptions:
    """What the kinds of heads have of their own. Each kind has some of it.

    Attributes:
        start_from: folder of a head to train further.
        num_layers: layers of the head, 1 to 5.
        block_size: rows of a block, 6 to 64.
        draft_vocab: number of tokens that the head can propose; ``None`` for 8192.
        layers: hidden states that the head reads, separated by commas; ``None`` for three or as
            many as it has layers, spread evenly.
        num_steps: number of tokens that are drafted in a row during training.
        num_anchors: blocks of a training row, at random positions.
        markov: kind of the Markov head: vanilla, gated or rnn.
        markov_rank: rank of the Markov head.
        state_gib: memory for hidden states that are read again in the next epoch, in GiB.
    """

    start_from: str | None = None
    num_layers: int = 2
    block_size: int = 8
    draft_vocab: int | None = None
    layers: tuple[int, ...] | None = None
    num_steps: int = 4
    num_anchors: int = 128
    markov: str = "vanilla"
    markov_rank: int = 256
    state_gib: float = 2.0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(parse_numbers("layers", text))


_EVERY = Group(
    HeadOptions,
    METHOD,
    {
        "start_from": Own(flag="--continue", panel=MODELS, metavar="HEAD"),
        "num_layers": Own(),
        "block_size": Own(),
        "draft_vocab": Own(),
        "layers": Own(kind=str, parse=_numbers),
        "num_steps": Own(flag="--steps"),
        "num_anchors": Own(flag="--anchors"),
        "markov": Own(),
        "markov_rank": Own(flag="--rank"),
        "state_gib": Own(panel=RUNNING),
    },
)
EAGLE3_OPTIONS = _EVERY.only("start_from", "draft_vocab", "layers", "num_steps", "state_gib").but(
    layers=Own(
        "Hidden states that the head reads, separated by commas; 2 is the input of the target's "
        "layer 2.",
        kind=str,
        parse=_numbers,
        show_default="2, L // 2, L - 3 of L layers",
    )
)
MTP_OPTIONS = _EVERY.only("start_from", "num_steps", "state_gib").but(
    start_from=Own(
        "Folder of an MTP layer to train further.",
        flag="--continue",
        panel=MODELS,
        metavar="LAYER",
        show_default="the target's own, otherwise a new one",
    )
)
DFLASH_OPTIONS = _EVERY.without("start_from", "num_steps", "markov", "markov_rank")
DSPARK_OPTIONS = _EVERY.without("start_from", "num_steps").but(block_size=7)


def settings_of(own: dict[str, Any]) -> dict[str, Any]:
    """The settings of a kind that were typed or have a default other than ``None``.

    Args:
        own: values of options by name.

    Raises:
        InvalidParameterError: what a continued head has already was set.
    """
    given = {name: value for name, value in own.items() if value is not None}
    if "start_from" in given:
        for name in ("draft_vocab", "layers"):
            if name in given:
                raise InvalidParameterError(name, "is that of the head given with --continue")
    return given
