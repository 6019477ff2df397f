"""What a step costs on this machine, as a function of what is asked of it.

A :class:`StageCost` is one model's measured time over the tokens of a pass. A :class:`LatencyModel`
joins target, draft and companion and follows the machine while it runs: step times that are
observed correct what was measured before. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

# Weight of an old step against the one after it, and of what was measured before (in steps).
_FORGETTING = 0.98
_PRIOR_STEPS = 8.0
# A pause of the machine is not a property of the step: observed times are cut to this range.
_MOST_EXTREME = 3.0


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
        rising = all(a < b for a, b in pairwise(self.tokens))
        monotone = all(a <= b for a, b in pairwise(self.seconds))
        if not self.tokens or len(self.tokens) != len(self.seconds) or not (rising and monotone):
            raise ValueError("tokens must rise, seconds must not fall, and each needs the other")

    def __call__(self, num_tokens: float, context: float = 0.0) -> float:
        """Seconds of a pass over ``num_tokens`` tokens with ``context`` tokens behind them."""
        if num_tokens <= 0:
            return 0.0
        tokens, seconds = self.tokens, self.seconds
        time = float(np.interp(num_tokens, tokens, seconds))
        if num_tokens > tokens[-1] and len(tokens) > 1:
            slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
            time += slope * (num_tokens - tokens[-1])
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
        """The inverse of :meth:`to_dict`."""
        return cls(
            tuple(values["tokens"]), tuple(values["seconds"]), float(values["per_context_token"])
        )


class LatencyModel:
    """Step time over what a step does, corrected by the step times that are seen.

    A step costs the draft's passes, the companion's pass, and ``k0 + k1·target(n) + k2·n`` for n
    tokens through the target, acceptance and bookkeeping included. The k start at (0, 1, 0), are
    fitted to live steps by least squares with forgetting, and are pulled towards the start so that
    a few odd steps, or steps all of one size, move the curve as a whole.
    """

    def __init__(
        self, target: StageCost, draft: StageCost | None = None, companion: StageCost | None = None
    ) -> None:
        self.target = target
        self.draft = draft
        self.companion = companion
        self._unit = max(target(1), 1e-9)
        # In units of one pass of one token, so that the pull is the same on any machine.
        self._start = np.array([0.0, 1.0, 0.0])
        self._normal = np.diag([_PRIOR_STEPS, 4 * _PRIOR_STEPS, 4 * _PRIOR_STEPS])
        self._moment = self._normal @ self._start
        self._k = self._start.copy()
        self._draft_scale = 1.0
        self._companion_scale = 1.0

    def target_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """The target's pass over ``num_tokens`` tokens, acceptance and bookkeeping included.

        Args:
            num_tokens: verified tokens plus one for each request.
            context: tokens of context, summed over the requests.
        """
        base = self.target(num_tokens, context) / self._unit
        k0, k1, k2 = self._k
        return float(max(k0 + k1 * base + k2 * num_tokens, 0.1 * base) * self._unit)

    def marginal_seconds(self, num_tokens: float, context: float = 0.0) -> float:
        """Cost of one token more at ``num_tokens``: the slope over a quarter of them."""
        window = max(1.0, num_tokens / 4)
        more = self.target_seconds(num_tokens + window, context)
        return max(0.0, (more - self.target_seconds(num_tokens, context)) / window)

    def draft_seconds(self, num_requests: float) -> float:
        """One token more for each of so many requests: a pass of the draft."""
        return 0.0 if self.draft is None else self._draft_scale * self.draft(num_requests)

    def companion_seconds(self, num_tokens: float) -> float:
        """The companion's pass over so many drafted tokens."""
        if self.companion is None:
            return 0.0
        return self._companion_scale * self.companion(num_tokens)

    def observe_target(self, num_tokens: int, context: int, seconds: float) -> None:
        """Learn from a step's time beside draft and companion; without prompts in it."""
        base = self.target(num_tokens, context) / self._unit
        predicted = self.target_seconds(num_tokens, context)
        seconds = min(max(seconds, predicted / _MOST_EXTREME), predicted * _MOST_EXTREME)
        # Relative errors count alike at every size.
        weight = 1.0 / max(predicted / self._unit, 1e-9) ** 2
        features = np.array([1.0, base, float(num_tokens)])
        prior = np.diag([_PRIOR_STEPS, 4 * _PRIOR_STEPS, 4 * _PRIOR_STEPS])
        kept = _FORGETTING
        self._normal = kept * self._normal + (1 - kept) * prior
        self._moment = kept * self._moment + (1 - kept) * (prior @ self._start)
        self._normal += weight * np.outer(features, features)
        self._moment += weight * features * (seconds / self._unit)
        self._k = np.linalg.solve(self._normal, self._moment)

    def observe_draft(self, counts: Sequence[int], seconds: float) -> None:
        """Learn from a step's draft time; ``counts[i]`` requests drafted at depth i."""
        if self.draft is not None and counts:
            base = sum(self.draft(count) for count in counts)
            self._draft_scale = _followed(self._draft_scale, seconds / base)

    def observe_companion(self, num_tokens: int, seconds: float) -> None:
        """Learn from the companion's time in a step that judged so many tokens."""
        if self.companion is not None and num_tokens:
            ratio = seconds / self.companion(num_tokens)
            self._companion_scale = _followed(self._companion_scale, ratio)

    @property
    def drift(self) -> float:
        """How much slower (above 1) the target runs than was measured, at eight tokens."""
        return self.target_seconds(8) / max(self.target(8), 1e-12)


def _followed(scale: float, ratio: float) -> float:
    ratio = min(max(ratio, scale / _MOST_EXTREME), scale * _MOST_EXTREME)
    return scale + (1 - _FORGETTING) * 2 * (ratio - scale)
