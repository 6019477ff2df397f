"""Options of ``draftwise train dflash`` and ``draftwise train dspark``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from draftwise.cli.fields import Group, Own
from draftwise.cli.option_values import parse_numbers
from draftwise.cli.options import RUNNING
from draftwise.cli.train_options import METHOD


@dataclass(frozen=True)
class BlockOptions:
    """Options of heads that draft blocks.

    Attributes:
        num_layers: layers of the head, 1 to 5.
        block_size: rows of a block, 6 to 64.
        draft_vocab: number of tokens that the head can propose.
        layers: hidden states that the head reads, separated by commas; ``None`` for three or as
            many as it has layers, spread evenly.
        num_anchors: blocks of a training row, at random positions.
        state_gib: memory for hidden states that are read again in the next epoch, in GiB.
    """

    num_layers: int = 2
    block_size: int = 8
    draft_vocab: int = 8192
    layers: tuple[int, ...] | None = None
    num_anchors: int = 128
    state_gib: float = 2.0

    def own(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(parse_numbers("layers", text))


BLOCK_OPTIONS = Group(
    BlockOptions,
    METHOD,
    {
        "num_layers": Own(),
        "block_size": Own(),
        "draft_vocab": Own(),
        "layers": Own(kind=str, parse=_numbers),
        "num_anchors": Own(flag="--anchors"),
        "state_gib": Own(panel=RUNNING),
    },
)
