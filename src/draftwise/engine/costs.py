"""Step costs measured while the engine runs, for policies that price their choices."""

from __future__ import annotations

from draftwise.core.latency import LatencyModel
from draftwise.core.types import StepTimes
from draftwise.engine.step import Step

# All of the first steps are learnt from, then one step in a few, because learning takes time.
_WARM_UP = 64
_LEARN_EVERY = 4


class CostLearner:
    """Corrects the latency model with measured step times."""

    def __init__(self, latency: LatencyModel | None) -> None:
        """Set up.

        Args:
            latency: the model to correct; ``None`` if no policy needs step costs.
        """
        self._latency = latency
        self._num_timed = 0

    def observe(self, step: Step, times: StepTimes) -> None:
        """Learn from a step if it was typical. Call this before its tokens are appended."""
        if self._latency is None or not step.is_typical or times.shared:
            return
        self._num_timed += 1
        if self._num_timed > _WARM_UP and self._num_timed % _LEARN_EVERY:
            return
        lengths = step.draft.lengths
        depths = range(max(lengths, default=0))
        self._latency.observe_step(
            num_target_tokens=step.num_target_tokens,
            context=step.context,
            drafting=[sum(length > depth for length in lengths) for depth in depths],
            num_scored=0 if step.companion_scores is None else sum(lengths),
            has_signals=step.draft.signals is not None,
            target_seconds=times.total - times.draft - times.companion - times.select,
            draft_seconds=times.draft,
            companion_seconds=times.companion,
        )
