"""A policy that was decided about elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.core.types import DraftRule
from draftwise.policies.base import Policy, RequestState


class Told(Policy):
    """Drafts what it is told to, by a rule in numbers if there is one.

    Attributes:
        by_rule: whether somebody took the rule.
    """

    name = "told"
    summary = "what was decided about elsewhere"
    source = "this project"

    def __init__(self, limits: Sequence[int], signals: bool, rule: DraftRule | None) -> None:
        """Take what was decided.

        Args:
            limits: ``[batch]`` most tokens of each request.
            signals: whether the draft's signals are wanted.
            rule: says who stops before, if any.
        """
        self.num_speculative_tokens = max(limits, default=0)
        self.by_rule = False
        self._limits = list(limits)
        self._signals = signals
        self._rule = rule

    def uses_draft_signals(self) -> bool:
        """As it was told."""
        return self._signals

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """As it was told."""
        return self._limits

    def asks_while_drafting(self) -> bool:
        """Never."""
        return False

    def draft_rule(self) -> DraftRule | None:
        """As it was told; whoever takes it follows it."""
        self.by_rule = self._rule is not None
        return self._rule
