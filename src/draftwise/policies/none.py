"""No speculation: the target decodes alone."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.policies.base import Policy
from draftwise.policies.inputs import RequestState


class NoSpeculation(Policy):
    """Draft nothing. Every step yields one token per request."""

    name = "none"
    summary = "target-only decoding"
    source = "the baseline"
    needs_draft = False

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """Zero for every request."""
        return [0] * len(requests)

    def looks_for_offers(self, requests: Sequence[RequestState]) -> bool:
        """Looking would take time for nothing."""
        return False

    def adds_offers(self, requests: Sequence[RequestState]) -> bool:
        """Looking would take time for nothing."""
        return False

    def branches(self, requests: Sequence[RequestState]) -> bool:
        """No shape is wanted."""
        return False

    def max_tree_nodes(self, requests: Sequence[RequestState]) -> list[int]:
        """Zero for every request."""
        return [0] * len(requests)
