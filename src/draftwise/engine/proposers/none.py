"""``none``: nothing is drafted."""

from __future__ import annotations

from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.proposers.base import Proposer
from draftwise.engine.proposers.by_name import register
from draftwise.policies.base import Policy


@register
class NoProposer(Proposer):
    """Proposes nothing, so every token comes from the target."""

    name = "none"
    summary = "proposes nothing"

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Return an empty draft for every request."""
        policy.plan_drafts(batch.states(lambda request: 0))
        return Draft.empty(len(batch.generating), self.context.device)
