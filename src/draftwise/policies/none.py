"""No speculation: the target decodes alone."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.policies.base import DraftPlan, Policy
from draftwise.policies.inputs import RequestState


class NoSpeculation(Policy):
    """Draft nothing. Every step yields one token per request."""

    name = "none"
    summary = "target-only decoding"
    source = "the baseline"
    needs_draft = False

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Looking would take time for nothing."""
        return False

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """Zero for every request."""
        return DraftPlan([0] * len(requests))
