"""What a step costs on this machine, as a function of what is asked of it.

A :class:`StageCost` is one model's measured time over the tokens of a pass. A :class:`LatencyModel`
joins target, draft and companion and follows the machine while it runs: step times that are
observed correct what was measured before. All times are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# Weight of an old step against the one after it.
_FORGETTING = 0.99
# Steps that count for "as measured" before anything is seen, and pull of a live correction towards
# the measured shape of the curve, in steps.
_PRIOR_STEPS = 2.0
_PULL = 0.5
# A pause of the machine is not a property of the step: observed times are cut to this range.
_MOST_EXTREME = 3.0
# Nor is a machine so many times slower or faster than it was when it was measured.
_MOST_WRONG = 1000.0
_SWEEPS = 10


@dataclass(frozen=True)
class StageCost:
    """Time of one pass of a model: piecewise linear and non-decreasing in its tokens.

    Attributes:
        tokens: numbers of tokens that were measured, ascending.
        seconds: time of a pass of as many, non-decreasing.
        per_context_token: further time per token of context that the pass attends to, summed over
            its requests.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    per_context_token: float = 0.0

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise((0.0, *self.tokens)))
        monotone = all(a <= b < math.inf for a, b in pairwise((0.0, *self.seconds)))
        if not self.tokens or len(self.tokens) != len(self.seconds) or not (rising and monotone):
            raise ValueError("tokens must rise, seconds must not fall, and each needs the other")
        if not 0 <= self.per_context_token < math.inf:
            raise ValueError("a token of context cannot cost less than nothing")

    def __call__(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of a pass over ``num_tokens`` tokens with ``context`` tokens behind them.

        Below what was measured it costs as much as the smallest pass; above, time grows as it did
        over the upper half.
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
        """As plain values, for a file."""
        return {
            "tokens": list(self.tokens),
            "seconds": list(self.seconds),
            "per_context_token": self.per_context_token,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StageCost:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError: these are not the values of a cost.
        """
        return cls(
            tuple(float(number) for number in values["tokens"]),
            tuple(float(number) for number in values["seconds"]),
            float(values["per_context_token"]),
        )


class LiveCost:
    """The time of one stage as measured, corrected by the times that are seen.

    A pass over n tokens takes ``k0·u + k1·stage(n) + k2·v·n`` with k ≥ 0, where u is the measured
    time of one token and v that per token of the largest pass, so that all k are pure numbers. They
    are fitted to relative errors by recursive least squares with forgetting, and pulled towards
    (0, f, 0) with f the one factor that fits best: steps all of one size move the curve as a
    whole and do not bend it. As no k is negative, the curve is positive and rises with n.
    """

    def __init__(self, stage: StageCost) -> None:
        """Start from what was measured."""
        self.stage = stage
        largest = stage.tokens[-1]
        self._scale = max(stage(1), 1e-9), max(stage(largest), 1e-9) / largest
        self._k = [0.0, 1.0, 0.0]
        # Of the least squares, forgetting: the first for the three k, the second for f alone.
        self._normal = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3
        self._factor_normal = self._factor_moment = _PRIOR_STEPS

    def __call__(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of a pass; 0 where there is nothing to do."""
        if num_tokens <= 0:
            return 0.0
        return self._predict(self._features(num_tokens, context))

    def observe(self, passes: Sequence[tuple[float, float]], seconds: float) -> None:
        """Learn from the time of some passes together.

        Args:
            passes: tokens and context of each; those without tokens do not count.
            seconds: of all. What is not a positive, finite number is ignored.
        """
        features = [self._features(*each) for each in passes if each[0] > 0]
        if not features or not 0 < seconds < math.inf:
            return
        total = [sum(column) for column in zip(*features, strict=True)]
        predicted = self._predict(total)
        seen = min(max(seconds / predicted, 1 / _MOST_EXTREME), _MOST_EXTREME)
        # Relative errors count alike at every size.
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
        return min(max(seconds, features[1] / _MOST_WRONG), features[1] * _MOST_WRONG)

    def _solve(self, factor: float) -> None:
        """Least squares over k ≥ 0: coordinate descent from the last solution."""
        k = self._k
        pull = _PULL / factor**2
        goal = 0.0, pull * factor, 0.0
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._normal):
                slope = row[0] * k[0] + row[1] * k[1] + row[2] * k[2] + pull * k[i]
                k[i] = max(0.0, k[i] - (slope - self._moment[i] - goal[i]) / (row[i] + pull))


class LatencyModel:
    """Step time over what a step does, corrected by the step times that are seen.

    A step costs the draft's passes, the companion's pass and the target's; each follows the machine
    as a :class:`LiveCost`. The target's includes acceptance and bookkeeping.

    Attributes:
        target: the target's pass as measured.
        draft: the draft's pass as measured, over the requests that draft.
        companion: the companion's pass as measured.
    """

    def __init__(
        self, target: StageCost, draft: StageCost | None = None, companion: StageCost | None = None
    ) -> None:
        """Start from what was measured; a stage that is ``None`` costs nothing."""
        self.restart(target, draft, companion)

    def restart(
        self, target: StageCost, draft: StageCost | None = None, companion: StageCost | None = None
    ) -> None:
        """Start again, from something else that was measured; what was seen is forgotten."""
        self.target = target
        self.draft = draft
        self.companion = companion
        self._target = LiveCost(target)
        self._draft = None if draft is None else LiveCost(draft)
        self._companion = None if companion is None else LiveCost(companion)

    def target_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """The target's pass over ``num_tokens`` tokens, acceptance and bookkeeping included.

        Args:
            num_tokens: verified tokens plus one for each request.
            context: tokens of context, summed over the requests.
        """
        return self._target(num_tokens, context)

    def marginal_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """Cost of one token more at ``num_tokens``: the slope over a quarter of them."""
        window = max(1.0, num_tokens / 4)
        more = self.target_seconds(num_tokens + window, context)
        return max(0.0, (more - self.target_seconds(num_tokens, context)) / window)

    def draft_seconds(self, num_requests: float) -> float:
        """One token more for each of so many requests: a pass of the draft."""
        return 0.0 if self._draft is None else self._draft(num_requests)

    def companion_seconds(self, num_tokens: float) -> float:
        """The companion's pass over so many drafted tokens."""
        return 0.0 if self._companion is None else self._companion(num_tokens)

    def observe_target(self, num_tokens: int, context: int, seconds: float) -> None:
        """Learn from a step's time beside draft and companion; without prompts in it."""
        self._target.observe([(num_tokens, context)], seconds)

    def observe_draft(self, counts: Sequence[int], seconds: float) -> None:
        """Learn from a step's draft time; ``counts[i]`` requests drafted at depth i."""
        if self._draft is not None:
            self._draft.observe([(count, 0.0) for count in counts], seconds)

    def observe_companion(self, num_tokens: int, seconds: float) -> None:
        """Learn from the companion's time in a step that judged so many tokens."""
        if self._companion is not None:
            self._companion.observe([(num_tokens, 0.0)], seconds)

    @property
    def drift(self) -> float:
        """How much slower (above 1) the target runs than was measured, at eight tokens."""
        return self.target_seconds(8) / max(self.target(8), 1e-12)
