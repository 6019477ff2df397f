"""The policy of a replica. The engine has already made its decisions."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.policies.base import DraftPlan, Policy
from draftwise.policies.inputs import RequestState


class PrecomputedPolicy(Policy):
    """Drafts to given lengths."""

    name = "precomputed"
    summary = "drafts to lengths that the engine decided"
    source = "this project"

    def __init__(self, limits: Sequence[int], signals: bool) -> None:
        """Set up.

        Args:
            limits: ``[batch]`` maximum draft length of each request.
            signals: whether the draft's signals are computed.
        """
        self.num_speculative_tokens = max(limits, default=0)
        self._limits = list(limits)
        self._signals = signals

    @property
    def uses_draft_signals(self) -> bool:
        """Whether the engine requested signals."""
        return self._signals

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """The given lengths."""
        return DraftPlan(self._limits)
