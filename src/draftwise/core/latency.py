"""Latency model: the duration of a step as a function of its workload.

A :class:`LatencyModel` combines the costs of target, draft and companion, see
:mod:`draftwise.core.stage_cost`, and corrects them online with the times of steps. All times are
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from draftwise.core.stage_cost import LiveCost, StageCost


@dataclass(frozen=True)
class Interference:
    """Slowdown of passes that run at the same time, relative to a pass alone on all cores.

    Attributes:
        target: slowdown of the target's pass.
        draft: slowdown of the draft model's passes.
    """

    target: float
    draft: float


class LatencyModel:
    """Step time as a function of the step's workload, corrected with observed step times.

    A step consists of the draft's passes, the companion's pass and the target's pass. Each is
    corrected online as a :class:`LiveCost`. The target's pass includes acceptance and bookkeeping.

    Attributes:
        target: profiled cost of the target's pass.
        draft: profiled cost of the draft's pass, as a function of the number of requests that
            draft.
        companion: profiled cost of the companion's pass.
        interference: slowdown of target and draft that run at the same time; ``None`` if it was not
            measured.
    """

    def __init__(
        self,
        target: StageCost,
        draft: StageCost | None = None,
        companion: StageCost | None = None,
        interference: Interference | None = None,
    ) -> None:
        """Start from profiled costs; a stage that is ``None`` costs nothing."""
        self.interference = interference
        self.restart(target, draft, companion)

    def restart(
        self, target: StageCost, draft: StageCost | None = None, companion: StageCost | None = None
    ) -> None:
        """Start again from other profiled costs, and discard all observations."""
        self.target = target
        self.draft = draft
        self.companion = companion
        self._target = LiveCost(target)
        self._draft = None if draft is None else LiveCost(draft)
        self._companion = None if companion is None else LiveCost(companion)

    def target_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of the target's pass over ``num_tokens`` tokens.

        This includes acceptance and bookkeeping.

        Args:
            num_tokens: verified tokens plus one for each request.
            context: tokens of context, summed over the requests.
        """
        return self._target(num_tokens, context)

    def draft_seconds(self, num_requests: float) -> float:
        """Seconds of one draft pass, which drafts one token for each of ``num_requests``.

        The first pass of a step also takes :attr:`first_draft_extra`.
        """
        return 0.0 if self._draft is None else self._draft(num_requests)

    @property
    def first_draft_extra(self) -> float:
        """Additional seconds of the first draft pass of a step.

        It sets up the draft, and may read several tokens of a request. It is measured with one.
        """
        return 0.0 if self._draft is None else self._draft.first_extra

    def drafting_seconds(self, counts: Sequence[float]) -> float:
        """Seconds of all draft passes of a step.

        Args:
            counts: number of requests that draft a token in each pass.
        """
        seconds = self.first_draft_extra if any(counts) else 0.0
        for count, passes in groupby(counts):  # most passes have as many requests as the one before
            seconds += self.draft_seconds(count) * len(list(passes))
        return seconds

    def companion_seconds(self, num_tokens: float) -> float:
        """Seconds of the companion's pass over ``num_tokens`` drafted tokens."""
        return 0.0 if self._companion is None else self._companion(num_tokens)

    def observe_target(self, num_tokens: int, context: int, seconds: float) -> None:
        """Update the target's cost with the time of a step that processed no prompt tokens.

        Args:
            num_tokens: verified tokens plus one for each request.
            context: tokens of context, summed over the requests.
            seconds: the step's time without draft and companion.
        """
        self._target.observe([(num_tokens, context)], seconds)

    def observe_draft(self, counts: Sequence[int], seconds: float) -> None:
        """Update the draft's cost with a step's draft time.

        Args:
            counts: number of requests that drafted a token at each depth.
            seconds: the step's draft time.
        """
        if self._draft is not None:
            self._draft.observe([(count, 0.0) for count in counts], seconds)

    def observe_companion(self, num_tokens: int, seconds: float) -> None:
        """Update the companion's cost with its time for a pass over ``num_tokens`` tokens."""
        if self._companion is not None:
            self._companion.observe([(num_tokens, 0.0)], seconds)

    def observe_step(
        self,
        *,
        num_target_tokens: int,
        context: int,
        drafting: Sequence[int],
        num_scored: int,
        has_signals: bool,
        is_regular: bool = False,
        target_seconds: float,
        draft_seconds: float,
        companion_seconds: float,
    ) -> None:
        """Update all costs with the times of one step that processed no prompt tokens.

        Args:
            num_target_tokens: number of tokens in the target's pass.
            context: tokens of context, summed over the requests.
            drafting: number of requests that drafted a token at each depth.
            num_scored: number of tokens in the companion's pass; 0 without a pass.
            has_signals: whether the draft's signals were computed. The time of the draft then
                includes signals, and does not update its cost. That of the target may include
                irregular rows.
            is_regular: whether the same number of tokens was verified for each request. Then the
                target's time updates its cost, with signals too.
            target_seconds, draft_seconds, companion_seconds: time of each part.
        """
        if is_regular or not has_signals:
            self.observe_target(num_target_tokens, context, target_seconds)
        if not has_signals:
            self.observe_draft(drafting, draft_seconds)
        if num_scored:
            self.observe_companion(num_scored, companion_seconds)
