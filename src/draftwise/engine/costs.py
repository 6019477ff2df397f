"""What steps cost while the engine runs, for those who plan by it."""

from __future__ import annotations

from draftwise.core.latency import LatencyModel
from draftwise.core.types import StepTimes
from draftwise.engine.overlap import Overlap
from draftwise.engine.side import PreparedStep

# Steps whose times are all learnt from, and then every how manieth.
_APPRENTICESHIP = 64
_LEARN_EVERY = 4


class CostLearner:
    """Tells the latency model, and who decides about overlap, what steps were like."""

    def __init__(self, latency: LatencyModel | None, overlap: Overlap | None) -> None:
        """Set up.

        Args:
            latency: follows the machine; ``None`` if nobody asks for it.
            overlap: follows what batches look like; ``None`` without.
        """
        self._latency = latency
        self._overlap = overlap
        self._num_timed = 0

    def observe(self, step: PreparedStep, times: StepTimes) -> None:
        """Learn from a step, if no prompt and no other step was in it."""
        batch, lengths = step.batch, step.draft.lengths
        if times.shared or batch.chunks or not batch.generating or not all(batch.can_draft):
            return
        if self._overlap is None and self._latency is None:
            return
        context = sum(len(request.tokens) for request in batch.generating)
        num_tokens = len(step.plan.lengths) + sum(step.plan.lengths)
        if self._overlap is not None:
            self._overlap.observe(num_tokens, context, lengths)
        self._num_timed += 1
        is_novice = self._num_timed <= _APPRENTICESHIP
        if self._latency is None or not (is_novice or self._num_timed % _LEARN_EVERY == 0):
            return
        # A step whose draft was looked at also takes the time for that, and where tokens are picked
        # its rows are irregular. That is no reason to think that all passes became slower.
        if step.draft.signals is None:
            seconds = times.total - times.draft - times.companion - times.select
            self._latency.observe_target(num_tokens, context, seconds)
            depths = range(max(lengths, default=0))
            drafting = [sum(length > depth for length in lengths) for depth in depths]
            self._latency.observe_draft(drafting, times.draft)
        if step.judgement is not None:
            self._latency.observe_companion(sum(lengths), times.companion)
