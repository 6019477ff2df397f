"""The policy of a replica. The engine has already made its decisions."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.core.rules import DraftRule
from draftwise.policies.base import Policy
from draftwise.policies.inputs import RequestState


class PrecomputedPolicy(Policy):
    """Drafts to given lengths, and stops earlier by a rule if there is one.

    Attributes:
        by_rule: whether a backend applied the rule.
    """

    name = "precomputed"
    summary = "drafts to lengths that the engine decided"
    source = "this project"

    def __init__(self, limits: Sequence[int], signals: bool, rule: DraftRule | None) -> None:
        """Set up.

        Args:
            limits: ``[batch]`` maximum draft length of each request.
            signals: whether the draft's signals are computed.
            rule: the stopping rule; ``None`` to draft to the limits.
        """
        self.num_speculative_tokens = max(limits, default=0)
        self.by_rule = False
        self._limits = list(limits)
        self._signals = signals
        self._rule = rule

    def uses_draft_signals(self) -> bool:
        """Whether the engine requested signals."""
        return self._signals

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """The given lengths."""
        return self._limits

    def may_stop_drafting(self) -> bool:
        """Never."""
        return False

    def draft_rule(self) -> DraftRule | None:
        """The rule. A backend that calls this applies it."""
        self.by_rule = self._rule is not None
        return self._rule
