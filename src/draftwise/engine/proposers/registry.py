"""Proposers by name."""

from __future__ import annotations

from typing import TypeVar

from draftwise.engine.proposers.base import Proposer, ProposerContext
from draftwise.errors import InvalidParameterError

PROPOSERS: dict[str, type[Proposer]] = {}

AnyProposer = TypeVar("AnyProposer", bound=type[Proposer])


def register(proposer: AnyProposer) -> AnyProposer:
    """Register a proposer class under its name. Use it as a class decorator.

    Raises:
        ValueError: another proposer has this name.
    """
    known = PROPOSERS.setdefault(proposer.name, proposer)
    if known is not proposer:
        raise ValueError(f"a proposer named {proposer.name!r} is registered already")
    return proposer


def create_proposer(name: str, context: ProposerContext) -> Proposer:
    """Create a registered proposer.

    Raises:
        InvalidParameterError: no proposer has this name, or it needs a draft model and none is
            given.
    """
    if name not in PROPOSERS:
        known = ", ".join(sorted(PROPOSERS))
        raise InvalidParameterError("draft", f"no proposer is named {name!r}; known are {known}")
    proposer = PROPOSERS[name]
    if proposer.needs_model and context.draft_model is None:
        raise InvalidParameterError("draft", f"proposer {name!r} needs a draft model")
    return proposer(context)


def is_proposer(name: str) -> bool:
    """Whether ``SpeculationConfig.draft`` names a proposer that needs no model."""
    return name in PROPOSERS and not PROPOSERS[name].needs_model
