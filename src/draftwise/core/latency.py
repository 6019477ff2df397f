"""Latency model: the duration of a step as a function of its workload.

A :class:`LatencyModel` combines the costs of target, draft and companion, see
:mod:`draftwise.core.stage_cost`, and corrects them online with the times of steps. All times are
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from draftwise.core.stage_cost import LiveCost, StageCost

Floats = NDArray[np.float64]


class LatencyModel:
    """Step time as a function of the step's workload, corrected with observed step times.

    A step consists of the draft's passes, the companion's pass and the target's pass. Each is
    corrected online as a :class:`LiveCost`. The target's pass includes acceptance and bookkeeping.

    Attributes:
        target: profiled cost of the target's pass.
        draft: profiled cost of the draft's pass, as a function of the number of requests that
            draft.
        companion: profiled cost of the companion's pass.
    """

    def __init__(
        self, target: StageCost, draft: StageCost | None = None, companion: StageCost | None = None
    ) -> None:
        """Start from profiled costs; a stage that is ``None`` costs nothing."""
        self.restart(target, draft, companion)

    def restart(
        self, target: StageCost, draft: StageCost | None = None, companion: StageCost | None = None
    ) -> None:
        """Start again from other profiled costs, and discard all observations."""
        self.target = target
        self.draft = draft
        self.companion = companion
        self._target = LiveCost(target)
        # Verifying a tree may take longer: sampled children are tested one by one.
        self._tree_target = LiveCost(target)
        self._draft = None if draft is None else LiveCost(draft)
        # A pass that grows a tree also selects its nodes, so it has a correction of its own.
        self._tree_draft = None if draft is None else LiveCost(draft)
        self._companion = None if companion is None else LiveCost(companion)

    def target_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of the target's pass over ``num_tokens`` tokens.

        This includes acceptance and bookkeeping.

        Args:
            num_tokens: verified tokens plus one for each request.
            context: tokens of context, summed over the requests.
        """
        return self._target(num_tokens, context)

    def target_curve(self, most: int, context: float = 0.0) -> Floats:
        """``[most + 1]`` seconds of the target's passes over 0 … ``most`` tokens.

        See :meth:`target_seconds`.
        """
        return self._target.curve(most, context)

    def marginal_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds per additional token: the slope from ``num_tokens`` to a quarter above it."""
        return self._target.marginal(num_tokens, context)

    def marginal_tree_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """:meth:`marginal_seconds` in a pass over token trees.

        It is that of other passes until a pass over trees was observed.
        """
        cost = self._tree_target if self._tree_target.was_observed else self._target
        return cost.marginal(num_tokens, context)

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

    def tree_draft_seconds(self, num_nodes: float) -> float:
        """Seconds of one draft pass that grows token trees from ``num_nodes`` nodes.

        It is that of a pass for chains until such a pass was observed.
        """
        cost = self._tree_cost
        return 0.0 if cost is None else cost(num_nodes)

    @property
    def first_tree_draft_extra(self) -> float:
        """Additional seconds of the first draft pass of a step with token trees."""
        cost = self._tree_cost
        return 0.0 if cost is None else cost.first_extra

    @property
    def _tree_cost(self) -> LiveCost | None:
        grown = self._tree_draft
        return grown if grown is not None and grown.was_observed else self._draft

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

    def observe_tree_draft(self, counts: Sequence[int], seconds: float) -> None:
        """Update the cost of growing token trees with a step's draft time.

        Args:
            counts: number of nodes that each pass read.
            seconds: the step's draft time.
        """
        if self._tree_draft is not None:
            passes = [(float(count), 0.0) for count in counts]
            self._tree_draft.observe(passes, seconds)

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
        growing: Sequence[int] = (),
        num_scored: int,
        has_signals: bool,
        is_regular: bool = False,
        is_tree: bool = False,
        target_seconds: float,
        draft_seconds: float,
        companion_seconds: float,
    ) -> None:
        """Update all costs with the times of one step that processed no prompt tokens.

        Args:
            num_target_tokens: number of tokens in the target's pass.
            context: tokens of context, summed over the requests.
            drafting: number of requests that drafted a token at each depth.
            growing: number of nodes that each draft pass read, in a step with token trees.
            num_scored: number of tokens in the companion's pass; 0 without a pass.
            has_signals: whether the draft's signals were computed. The time of the draft then
                includes signals, and does not update its cost. That of the target may include
                irregular rows.
            is_regular: whether the same number of tokens was verified for each request. Then the
                target's time updates its cost, with signals too.
            is_tree: whether the target verified token trees.
            target_seconds, draft_seconds, companion_seconds: time of each part.
        """
        if is_tree:
            self._tree_target.observe([(num_target_tokens, context)], target_seconds)
        elif is_regular or not has_signals:
            self.observe_target(num_target_tokens, context, target_seconds)
        if not has_signals:
            self.observe_draft(drafting, draft_seconds)
            self.observe_tree_draft(growing, draft_seconds)
        if num_scored:
            self.observe_companion(num_scored, companion_seconds)
