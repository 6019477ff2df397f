"""Whether drafts are chains or token trees: the shape with the better goodput on this machine.

A tree gains more tokens per step than a chain, and its step takes longer. Which is more depends on
the models, the text, the load, and on how long a pass over more tokens takes. So both are measured,
at each batch size. They take turns at first. Later, the worse one gets a turn when so few of its
steps are recent that it may have become the better one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Number of steps of a turn.
_TURN = 8
# Weight of a step relative to the step after it.
_FORGETTING = 0.998
# Standard deviation of a step's tokens per request, and of its duration, relative to their means.
_SPREAD_OF_TOKENS, _SPREAD_OF_SECONDS = 0.6, 0.1
# A batch size that is new begins with what the nearest known one has measured, as so many steps.
_PRIOR_STEPS = 8.0
# Durations are clipped to this factor of their mean. A pause of the machine says nothing.
_MOST_UNUSUAL = 3.0


class ShapeChoice:
    """Chooses between chains and trees, from the goodput of earlier steps."""

    def __init__(self) -> None:
        """Start with a turn of trees."""
        self._records: dict[int, _Record] = {}
        self._current: _Record | None = None

    def branches(self, num_requests: int) -> bool:
        """Whether the drafts of the coming step are trees. Call it once per step, or never.

        Args:
            num_requests: number of requests that gain tokens in the step.
        """
        record = self._record(max(num_requests, 1))
        if not record.steps_left:
            record.branches = record.may_be_best(num_requests)
            record.steps_left = _TURN
        record.steps_left -= 1
        self._current = record
        return record.branches

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record a step that processed no prompts.

        Args:
            num_tokens: number of tokens that the requests gained.
            seconds: its duration.
        """
        record, self._current = self._current, None
        if record is None:
            return
        for shape in record.shapes:
            shape.forget()
        shape = record.shapes[record.branches]
        if shape.steps:
            seconds = min(seconds, _MOST_UNUSUAL * shape.seconds / shape.steps)
        shape.steps += 1
        shape.tokens += num_tokens
        shape.seconds += seconds

    def _record(self, num_requests: int) -> _Record:
        """What is known at a batch size; two groups per doubling share it."""
        bucket = round(2 * math.log2(num_requests))
        if bucket not in self._records:
            known = [other for other, record in self._records.items() if record.is_known]
            nearest = min(known, key=lambda other: abs(other - bucket), default=None)
            self._records[bucket] = (
                _Record((_Shape(), _Shape()))
                if nearest is None
                else self._records[nearest].as_prior()
            )
        return self._records[bucket]


@dataclass
class _Shape:
    """Recent steps of one shape, as sums.

    Attributes:
        steps: number of steps.
        tokens: tokens that they gained.
        seconds: their duration.
    """

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def forget(self) -> None:
        """Give all steps less weight."""
        self.steps *= _FORGETTING
        self.tokens *= _FORGETTING
        self.seconds *= _FORGETTING

    def as_prior(self) -> _Shape:
        """The same means, with the weight of a few steps."""
        share = _PRIOR_STEPS / self.steps
        return _Shape(_PRIOR_STEPS, share * self.tokens, share * self.seconds)

    def optimistic_goodput(self, num_requests: int) -> float:
        """The goodput, plus one standard error; infinite without any step."""
        if not self.seconds:
            return math.inf
        variance = _SPREAD_OF_TOKENS**2 / num_requests + _SPREAD_OF_SECONDS**2
        return self.tokens / self.seconds * (1.0 + math.sqrt(variance / self.steps))


@dataclass
class _Record:
    """Both shapes at similar batch sizes.

    Attributes:
        shapes: chains and trees.
        branches: whether the current turn is that of trees.
        steps_left: number of steps until the turn ends.
    """

    shapes: tuple[_Shape, _Shape]
    branches: bool = True
    steps_left: int = 0

    @property
    def is_known(self) -> bool:
        """Whether both shapes had a step."""
        return all(shape.seconds for shape in self.shapes)

    def may_be_best(self, num_requests: int) -> bool:
        """Whether trees may be better than chains may be."""
        chains, trees = (shape.optimistic_goodput(num_requests) for shape in self.shapes)
        return trees >= chains

    def as_prior(self) -> _Record:
        """The beginning of another batch size."""
        chains, trees = self.shapes
        return _Record((chains.as_prior(), trees.as_prior()))
