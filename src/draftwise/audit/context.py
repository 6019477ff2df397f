"""What every check of an audit needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftwise.audit.abilities import Abilities
from draftwise.audit.budget import Budget
from draftwise.audit.client import Item, Model, Result, Server, at_once
from draftwise.audit.settings import AuditSettings


@dataclass(frozen=True)
class Context:
    """Servers, prompts and limits of an audit.

    Attributes:
        server: the audited server.
        baseline: what answers without speculation.
        abilities: what both can do, with the baseline's log-probabilities and filters.
        own: the same with those of the audited server.
        prompts: the prompts.
        settings: settings of the audit.
        budget: limits of the audit.
    """

    server: Server
    baseline: Model
    abilities: Abilities
    own: Abilities
    prompts: list[str]
    settings: AuditSettings
    budget: Budget

    @property
    def models(self) -> tuple[Server, Model]:
        """The audited server and the baseline."""
        return self.server, self.baseline

    def commands(self, prompt: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """Commands of a shell that send a request to both."""
        return tuple(model.command(prompt, **fields) for model in self.models)

    def at_once(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Results of a function for all items, with the concurrency of the audit."""
        return at_once(work, items, self.settings.concurrency)
