"""The kind of draft that is trained for a target if none is named, by what was measured."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from draftwise.distillation.mtp import why_not_trained
from draftwise.distillation.settings import KINDS
from draftwise.distillation.target import read_config
from draftwise.errors import InvalidParameterError
from draftwise.models.heads.mtp import num_mtp_layers


@dataclass(frozen=True)
class Choice:
    """A kind of draft for a target.

    Attributes:
        kind: a key of :data:`KINDS`.
        reason: why it is chosen, a clause.
    """

    kind: str
    reason: str


def best_kind(target: str, trust_remote_code: bool = False) -> Choice:
    """The kind of draft that did best for such a target (docs/training.md).

    Args:
        target: a folder, a hub id or a zoo name.
        trust_remote_code: whether to run code that comes with the target.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: it is quantised, or its configuration cannot be read.
        InvalidParameterError: what is named is nearly a kind, and no model.
    """
    near = difflib.get_close_matches(target, KINDS, n=1)
    if near and not Path(target).exists():
        raise InvalidParameterError("kind", f"there is no {target!r}; did you mean {near[0]!r}?")
    config = read_config(target, "target", trust_remote_code)
    if num_mtp_layers(config) and why_not_trained(config) is None:
        return Choice("mtp", "the target has an MTP layer, which was trained with it")
    return Choice(
        "eagle3", "it was ahead of DSpark and DFlash at every measured length of training"
    )
