"""Proposers draft tokens. Each proposer is one file with a class that is registered by name."""

from importlib import import_module
from pkgutil import iter_modules

from draftwise.engine.proposers.base import Proposer, ProposerContext, TokenProposer
from draftwise.engine.proposers.by_name import PROPOSERS, create_proposer, register

# Importing a file of this folder registers its proposer.
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "PROPOSERS",
    "Proposer",
    "ProposerContext",
    "TokenProposer",
    "create_proposer",
    "register",
]
