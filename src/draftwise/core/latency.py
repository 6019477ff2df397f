"""Latency model: the duration of a step as a function of its workload.

A :class:`StageCost` is one model's profiled pass time as a function of the number of tokens. A
:class:`LatencyModel` combines target, draft and companion, and corrects the profile online with
observed step times. All times are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Forgetting factor: weight of a step relative to the step after it.
_FORGETTING = 0.99
# Weight of the profile as a prior, and of the regularisation towards the profiled shape of the
# curve. Both are in units of observed steps.
_PRIOR_STEPS = 2.0
_SHAPE_REGULARISATION = 0.5
# Observed times are clipped to this factor around the prediction, as a pause of the machine is not
# a property of the step.
_MAX_OBSERVED_RATIO = 3.0
# The corrected time stays within this factor of the profiled time.
_MAX_CORRECTION = 1000.0
_NUM_DESCENT_SWEEPS = 10
# The smallest pass takes at least this share of the mean over the passes of a step.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class StageCost:
    """Time of one pass of a model: piecewise linear and non-decreasing in its number of tokens.

    Attributes:
        tokens: measured numbers of tokens, ascending.
        seconds: measured time of a pass over each number of tokens, non-decreasing.
        per_context_token: additional seconds per context token that the pass attends to. Context
            is summed over the requests.
        first_extra: additional seconds of the first pass of a step.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    per_context_token: float = 0.0
    first_extra: float = 0.0

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise((0.0, *self.tokens)))
        monotone = all(a <= b < math.inf for a, b in pairwise((0.0, *self.seconds)))
        if not self.tokens or len(self.tokens) != len(self.seconds) or not (rising and monotone):
            raise ValueError(
                "tokens must be ascending, seconds must be non-decreasing, and both must have the "
                "same length"
            )
        if not 0 <= self.per_context_token < math.inf:
            raise ValueError("per_context_token must be finite and non-negative")
        if not 0 <= self.first_extra < math.inf:
            raise ValueError("first_extra must be finite and non-negative")

    def __call__(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of a pass over ``num_tokens`` tokens that attends to ``context`` tokens.

        Below the measured range the time is that of the smallest pass. Above it, the time is
        extrapolated with the slope over the upper half of the range.
        """
        if num_tokens <= 0:
            return 0.0
        tokens, seconds = self.tokens, self.seconds
        above = bisect_right(tokens, num_tokens)
        if above == 0:
            time = seconds[0]
        else:
            time = seconds[above - 1]
            if above < len(tokens):
                slope = (seconds[above] - time) / (tokens[above] - tokens[above - 1])
            else:
                half = max(0, bisect_right(tokens, tokens[-1] / 2) - 1)
                run = tokens[-1] - tokens[half]
                slope = (seconds[-1] - seconds[half]) / run if run else 0.0
            time += slope * (num_tokens - tokens[above - 1])
        return time + self.per_context_token * context

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as JSON-compatible values."""
        return {
            "tokens": list(self.tokens),
            "seconds": list(self.seconds),
            "per_context_token": self.per_context_token,
            "first_extra": self.first_extra,
        }

    def split(self, first_extra: float, num_passes: int) -> StageCost:
        """The cost of single passes, if the seconds are means over the passes of a step.

        Args:
            first_extra: additional seconds of the first pass.
            num_passes: number of passes that the means are over.
        """
        # Together the passes take as long as was measured, and each of them takes some time.
        share = min(first_extra / num_passes, (1 - _LEAST_SHARE) * self.seconds[0])
        seconds = tuple(each - share for each in self.seconds)
        return replace(self, seconds=seconds, first_extra=num_passes * share)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StageCost:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: the values do not describe a cost.
        """
        return cls(
            tuple(float(number) for number in values["tokens"]),
            tuple(float(number) for number in values["seconds"]),
            float(values["per_context_token"]),
            # Older files have the mean over all passes of a step.
            float(values.get("first_extra", 0.0)),
        )


class LiveCost:
    """The profiled time of one stage, corrected online with observed times.

    A pass over n tokens takes ``k0·u + k1·stage(n) + k2·v·n`` with k ≥ 0. Here u is the profiled
    time of a pass over one token, and v is the profiled time per token of the largest pass, so all
    k are dimensionless. The k minimise relative errors by recursive least squares with forgetting.
    They are regularised towards (0, f, 0), where f is the best-fitting single factor. Steps that
    are all of one size therefore scale the curve and do not change its shape. As no k is negative,
    the curve is positive and increases with n. What the first pass of a step takes beyond the
    others is multiplied by k1.

    Attributes:
        stage: the profiled cost.
        was_observed: whether any time was observed.
    """

    def __init__(self, stage: StageCost) -> None:
        """Start from the profiled cost."""
        self.stage = stage
        self.was_observed = False
        largest = stage.tokens[-1]
        self._scale = max(stage(1), 1e-9), max(stage(largest), 1e-9) / largest
        self._k = [0.0, 1.0, 0.0]
        # Running sums of the least squares: for the three k, and for f alone.
        self._normal = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3
        self._factor_normal = self._factor_moment = _PRIOR_STEPS
        self._profiled: Floats = np.zeros(0)
        self._counts: Floats = np.zeros(0)

    def __call__(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of a pass that is not the first of a step; 0 without tokens."""
        if num_tokens <= 0:
            return 0.0
        return self._predict(self._features(num_tokens, context))

    @property
    def first_extra(self) -> float:
        """Additional seconds of the first pass of a step."""
        return self._k[1] * self.stage.first_extra

    def marginal(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds per additional token: the slope from ``num_tokens`` to a quarter above it."""
        window = max(1.0, num_tokens / 4)
        more = self(num_tokens + window, context)
        return max(0.0, (more - self(num_tokens, context)) / window)

    def curve(self, most: int, context: float = 0.0) -> Floats:
        """``[most + 1]`` seconds of passes over 0 … ``most`` tokens."""
        per_pass, per_token = self._scale
        profiled, counts = self._stage_seconds(most)
        base = np.maximum(profiled + self.stage.per_context_token * context, 1e-9)
        seconds = self._k[1] * base
        seconds += self._k[0] * per_pass
        seconds += (self._k[2] * per_token) * counts
        np.maximum(seconds, base / _MAX_CORRECTION, out=seconds)
        np.minimum(seconds, base * _MAX_CORRECTION, out=seconds)
        seconds[0] = 0.0
        return seconds

    def _stage_seconds(self, most: int) -> tuple[Floats, Floats]:
        """``[most + 1]`` profiled seconds, without context, and token counts. Computed once."""
        if len(self._profiled) <= most:
            self._counts = np.arange(max(2 * most, 64) + 1, dtype=np.float64)
            self._profiled = np.array([self.stage(n) for n in self._counts.tolist()])
        return self._profiled[: most + 1], self._counts[: most + 1]

    def observe(self, passes: Sequence[tuple[float, float]], seconds: float) -> None:
        """Update the correction with the total time of the passes of a step.

        Args:
            passes: tokens and context of each pass. Passes without tokens are ignored.
            seconds: total time. A value that is not positive and finite is ignored.
        """
        features = [self._features(*each) for each in passes if each[0] > 0]
        if not features or not 0 < seconds < math.inf:
            return
        self.was_observed = True
        total = [sum(column) for column in zip(*features, strict=True)]
        total[1] += self.stage.first_extra
        predicted = self._predict(total)
        seen = min(max(seconds / predicted, 1 / _MAX_OBSERVED_RATIO), _MAX_OBSERVED_RATIO)
        # Dividing by the prediction makes the errors relative, so every size has the same weight.
        total = [feature / predicted for feature in total]
        for i in range(3):
            self._moment[i] = _FORGETTING * self._moment[i] + total[i] * seen
            for j in range(3):
                self._normal[i][j] = _FORGETTING * self._normal[i][j] + total[i] * total[j]
        self._factor_normal = _FORGETTING * self._factor_normal + total[1] ** 2
        self._factor_moment = _FORGETTING * self._factor_moment + total[1] * seen
        self._solve(self._factor_moment / self._factor_normal)

    def _features(self, num_tokens: float, context: float) -> tuple[float, float, float]:
        per_pass, per_token = self._scale
        base = max(self.stage(num_tokens, max(context, 0.0)), 1e-9)
        return per_pass, base, per_token * num_tokens

    def _predict(self, features: Sequence[float]) -> float:
        seconds = sum(k * feature for k, feature in zip(self._k, features, strict=True))
        return min(max(seconds, features[1] / _MAX_CORRECTION), features[1] * _MAX_CORRECTION)

    def _solve(self, factor: float) -> None:
        """Solve the least squares problem over k ≥ 0 by coordinate descent from the last k."""
        k = self._k
        pull = _SHAPE_REGULARISATION / factor**2
        goal = 0.0, pull * factor, 0.0
        for _ in range(_NUM_DESCENT_SWEEPS):
            for i, row in enumerate(self._normal):
                slope = row[0] * k[0] + row[1] * k[1] + row[2] * k[2] + pull * k[i]
                k[i] = max(0.0, k[i] - (slope - self._moment[i] - goal[i]) / (row[i] + pull))


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
        first = self.first_draft_extra if any(counts) else 0.0
        return first + sum(self.draft_seconds(count) for count in counts)

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

    @property
    def drift(self) -> float:
        """Corrected over profiled time of the target's pass at eight tokens; above 1 is slower."""
        return self.target_seconds(8) / max(self.target(8), 1e-12)
