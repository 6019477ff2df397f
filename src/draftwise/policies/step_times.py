"""What steps take at similar batch sizes, by what they draft.

The time of a step is estimated as ``computed · exp(pace + correction)``. The computed seconds come
from the profiled costs of its passes. The pace is common to all steps and follows the machine. The
correction is what steps of one kind take beyond it. All corrections are logarithms.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

# The kind of a step is the draft length of the model, or 0 without drafts. It is one of these if
# tokens are copied and the model drafts nothing, and if token trees are verified.
COPIES, TREES = -1, -100
# Added to the kind of a step that a companion scores.
SCORED = 1000

# The pace is the median over so many steps, which follows the machine and ignores single pauses.
_PACE_STEPS = 5
# Steps of a batch size after which an observation has lost most of its weight.
_MEMORY = 512
# Largest surprise in the logarithm of a step's time that counts, so that a pause of the machine is
# not taken for a property of the step.
_CLIP = 0.1
# The same for the first steps of a kind, about which the profile may be wrong.
_FIRST_CLIP = 0.4
# A kind that was measured in fewer steps is corrected like the nearest kind that was.
_FEW_STEPS = 8


class _Correction(NamedTuple):
    """What a kind of step takes beyond the pace, and in how many steps that was measured."""

    log: float
    weight: float


_NOTHING = _Correction(0.0, 0.0)


class StepTimes:
    """Times of steps at similar batch sizes.

    Attributes:
        num_steps: number of observed steps.
    """

    def __init__(self) -> None:
        """Begin with the profile, which counts as one step without drafts."""
        self.num_steps = 0
        self._recent: deque[float] = deque(maxlen=_PACE_STEPS)
        self._known: dict[int, _Correction] = {0: _Correction(0.0, 1.0)}

    def factor(self, kind: int) -> float:
        """Seconds of a step relative to the computed ones."""
        return math.exp(self._pace + self._correction(kind))

    def weight(self, kind: int) -> float:
        """In how many steps a kind was measured, with forgetting; 0 if never."""
        return self._known.get(kind, _NOTHING).weight

    @property
    def has_reference(self) -> bool:
        """Whether steps without drafts were measured, beside what the profile says."""
        return self.weight(0) > 1.0

    def is_known(self, kind: int) -> bool:
        """Whether a kind was measured in enough steps for an estimate of its own."""
        return self.weight(kind) >= _FEW_STEPS

    def observe(self, kind: int, ratio: float) -> None:
        """Learn from a step.

        Args:
            kind: what was drafted: a draft length or one of the constants above.
            ratio: its seconds relative to the computed ones.
        """
        kept = 1 - 1 / _MEMORY
        for each, (log, weight) in self._known.items():
            self._known[each] = _Correction(log, kept * weight)
        known, weight = self._correction(kind), self.weight(kind)
        limit = _FIRST_CLIP if weight < 2 else _CLIP
        surprise = min(max(math.log(ratio) - self._pace - known, -limit), limit)
        log = known + surprise / (weight + 1)
        self._known[kind] = _Correction(log, weight + 1)
        self._recent.append(math.log(ratio) - log)
        self.num_steps += 1

    @property
    def _pace(self) -> float:
        return median(self._recent) if self._recent else 0.0

    def _correction(self, kind: int) -> float:
        own = self._known.get(kind, _NOTHING)
        if not kind or self.is_known(kind):
            return own.log
        others = [k for k, c in self._known.items() if k not in (0, kind) and c.weight >= 1] or [0]
        near = self._known[min(others, key=lambda other: abs(other - kind))]
        return (own.weight * own.log + near.log) / (own.weight + 1)
