"""Proposers by name."""

from __future__ import annotations

from typing import TypeVar

from draftwise.engine.proposers.base import Proposer, ProposerContext
from draftwise.errors import InvalidParameterError
from draftwise.speculation import SpeculationConfig

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


def model_free_proposers(speculation: SpeculationConfig) -> list[str]:
    """The configured drafts that are proposers without a model."""
    return [name for name in speculation.draft_names if _is_model_free(name)]


def draft_model_name(speculation: SpeculationConfig) -> str | None:
    """The name of the configured draft model; ``None`` without one.

    Raises:
        InvalidParameterError: there are several draft models, or drafts that cannot be combined.
    """
    names = [name for name in speculation.draft_names if not _is_model_free(name)]
    others = model_free_proposers(speculation)
    if len(names) > 1:
        raise InvalidParameterError("draft", f"names several draft models: {', '.join(names)}")
    if len(others) > 1:
        raise InvalidParameterError("draft", f"cannot combine {' and '.join(map(repr, others))}")
    if names and others and not PROPOSERS[others[0]].estimates_acceptance:
        raise InvalidParameterError(
            "draft", f"{others[0]!r} cannot be combined with a draft model; 'suffix' can"
        )
    return names[0] if names else None


def _is_model_free(name: str) -> bool:
    """Whether a draft is the name of a proposer that needs no model."""
    return name in PROPOSERS and not PROPOSERS[name].needs_model
