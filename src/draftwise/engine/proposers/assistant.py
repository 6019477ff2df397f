"""``assistant``: a draft that reads the target's own keys and values."""

from __future__ import annotations

from draftwise.engine.batch import Batch
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.loop import DraftingBackend
from draftwise.engine.proposers.by_name import register
from draftwise.engine.proposers.model import ModelProposer


@register
class AssistantProposer(ModelProposer):
    """An assistant of Gemma 4 (Google, 2026) that drafts token by token.

    All tokens of a draft are read at one position, with the same keys and values of the target.
    """

    name = "assistant"
    summary = "a draft that reads the target's keys and values"
    drafts_trees = False

    def _new_backends(self) -> list[DraftingBackend]:
        """Passes that support every step."""
        return [EagerBackend(self.cached_model)]

    def must_read(self, batch: Batch) -> bool:
        """False: the target reads all that is not drafted."""
        return False
