"""The time of one model's passes: profiled, and corrected online with observed times.

A :class:`StageCost` is the profiled time of a pass as a function of the number of tokens. A
:class:`LiveCost` corrects it with the times of steps. All times are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

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
    """

    def __init__(self, stage: StageCost) -> None:
        """Start from the profiled cost."""
        self.stage = stage
        largest = stage.tokens[-1]
        self._scale = max(stage(1), 1e-9), max(stage(largest), 1e-9) / largest
        self._k = [0.0, 1.0, 0.0]
        # Running sums of the least squares: for the three k, and for f alone.
        self._normal = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3
        self._factor_normal = self._factor_moment = _PRIOR_STEPS

    def __call__(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of a pass that is not the first of a step; 0 without tokens."""
        if num_tokens <= 0:
            return 0.0
        return self._predict(self._features(num_tokens, context))

    @property
    def first_extra(self) -> float:
        """Additional seconds of the first pass of a step."""
        return self._k[1] * self.stage.first_extra

    def observe(self, passes: Sequence[tuple[float, float]], seconds: float) -> None:
        """Update the correction with the total time of the passes of a step.

        Args:
            passes: tokens and context of each pass. Passes without tokens are ignored.
            seconds: total time. A value that is not positive and finite is ignored.
        """
        features = [self._features(*each) for each in passes if each[0] > 0]
        if not features or not 0 < seconds < math.inf:
            return
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
        (k0, k1, k2), (per_pass, base, of_tokens) = self._k, features
        seconds = k0 * per_pass + k1 * base + k2 * of_tokens
        return min(max(seconds, base / _MAX_CORRECTION), base * _MAX_CORRECTION)

    def _solve(self, factor: float) -> None:
        """Solve the least squares problem over k ≥ 0 by coordinate descent from the last k."""
        k = self._k
        pull = _SHAPE_REGULARISATION / factor**2
        goal = 0.0, pull * factor, 0.0
        for _ in range(_NUM_DESCENT_SWEEPS):
            for i, row in enumerate(self._normal):
                slope = row[0] * k[0] + row[1] * k[1] + row[2] * k[2] + pull * k[i]
                k[i] = max(0.0, k[i] - (slope - self._moment[i] - goal[i]) / (row[i] + pull))
