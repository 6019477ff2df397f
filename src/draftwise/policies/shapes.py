"""Whether drafts are chains or token trees: the shape with the better goodput on this machine.

A tree gains more tokens per step than a chain, and its step takes longer. Which is more depends on
the models, the text, the load, and on how long a pass over more tokens takes. So both are measured,
at each batch size. They take turns until the goodput of both is known well enough. Later, the worse
one gets a turn when so few of its steps are recent that it may have become the better one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from draftwise.policies.nearest import record_of

# Number of steps of a turn.
_TURN = 8
# Weight of a step relative to the step after it.
_FORGETTING = 0.998
# Standard deviation of a step's tokens per request, and of its duration, relative to their means.
_SPREAD_OF_TOKENS, _SPREAD_OF_SECONDS = 0.6, 0.1
# They take turns until both had so many that count, and until the relative standard error of their
# goodput is at most this, or until one is clearly better. The first turn of each does not count: it
# may compile kernels, and the policy does not know yet how much to draft.
_FIRST_TURNS, _FIRST_ERROR = 3, 0.1
# A batch size that is new begins with what the nearest known one has measured, as at most so many
# steps.
_PRIOR_STEPS = 8.0
# Durations are clipped to this factor of their mean. A pause of the machine says nothing.
_MOST_UNUSUAL = 3.0


class ShapeChoice:
    """Chooses between chains and trees, from the goodput of earlier steps."""

    def __init__(self) -> None:
        """Start with a turn of chains."""
        self._records: dict[int, _Record] = {}
        self._current = _Record(_Shape(), _Shape())

    def branches(self, num_requests: int) -> bool:
        """Whether the drafts of the coming step are trees. Call it once per step, or never.

        Args:
            num_requests: number of requests that gain tokens in the step, at least 1.
        """
        self._current = record = self._record(num_requests)
        if not record.steps_left:
            record.begin_turn(num_requests)
        record.steps_left -= 1
        return record.branches

    def observe(self, tokens: float, duration: float) -> None:
        """Record the step that was asked about last. It must not process prompts.

        Args:
            tokens: number of tokens that each request gained, on average.
            duration: relative to that of a step without drafts, by the cost model.
        """
        self._current.observe(tokens, duration)

    def _record(self, num_requests: int) -> _Record:
        """What is known at a batch size. Similar ones share it."""
        return record_of(
            self._records,
            num_requests,
            lambda record: record.is_known,
            lambda known: _Record(_Shape(), _Shape()) if known is None else known.as_prior(),
        )


def _relative_error(num_requests: int, steps: float) -> float:
    """Standard error of the goodput of some steps, relative to it."""
    variance = _SPREAD_OF_TOKENS**2 / num_requests + _SPREAD_OF_SECONDS**2
    return math.sqrt(variance / steps)


@dataclass
class _Shape:
    """Recent steps of one shape, as sums.

    Attributes:
        steps: number of steps.
        tokens: tokens per request that they gained.
        duration: their relative duration.
        num_turns: number of turns so far.
        num_skipped: number of its first steps that were left out.
    """

    steps: float = 0.0
    tokens: float = 0.0
    duration: float = 0.0
    num_turns: int = 0
    num_skipped: int = 0

    def forget(self) -> None:
        """Give all steps less weight."""
        self.steps *= _FORGETTING
        self.tokens *= _FORGETTING
        self.duration *= _FORGETTING

    def observe(self, tokens: float, duration: float) -> None:
        """Add a step."""
        if self.num_skipped < _TURN:
            self.num_skipped += 1
            return
        if self.steps:
            duration = min(duration, _MOST_UNUSUAL * self.duration / self.steps)
        self.steps += 1
        self.tokens += tokens
        self.duration += duration

    def as_prior(self) -> _Shape:
        """The same means, with the weight of a few steps at most."""
        weight = min(1.0, _PRIOR_STEPS / self.steps)
        return _Shape(
            weight * self.steps,
            weight * self.tokens,
            weight * self.duration,
            num_skipped=_TURN,
        )

    def optimistic_goodput(self, num_requests: int) -> float:
        """The goodput, plus one standard error."""
        return self.goodput * (1.0 + _relative_error(num_requests, self.steps))

    @property
    def goodput(self) -> float:
        """Relative to one token per step without drafts. The shape must have been measured."""
        return self.tokens / self.duration


@dataclass
class _Record:
    """Both shapes at similar batch sizes.

    Attributes:
        chains, trees: recent steps of both.
        branches: whether the current turn is that of trees.
        steps_left: number of steps until the turn ends.
        is_settled: whether the shapes no longer take turns regardless of their goodput.
    """

    chains: _Shape
    trees: _Shape
    is_settled: bool = False
    branches: bool = field(default=True, init=False)
    steps_left: int = field(default=0, init=False)

    @property
    def is_known(self) -> bool:
        """Whether both shapes were measured, in more than a few steps."""
        return self.is_settled and self.chains.duration > 0 and self.trees.duration > 0

    def begin_turn(self, num_requests: int) -> None:
        """Give the next turn to the shape that may be best; the first one to chains.

        Trees that were not measured in their first turns are given up. Chains never are.
        """
        chains, trees = self.chains, self.trees
        self.is_settled |= self._had_first_turns(num_requests)
        if not chains.num_skipped:  # every step so far also read prompts
            self.branches = False
        elif not self.is_settled:
            self.branches = not self.branches
        elif not chains.duration or not trees.duration:
            self.branches = False
        else:
            goodput = chains.optimistic_goodput(num_requests)
            self.branches = trees.optimistic_goodput(num_requests) > goodput
        self.steps_left = _TURN
        (self.trees if self.branches else self.chains).num_turns += 1

    def _had_first_turns(self, num_requests: int) -> bool:
        """Whether both shapes had enough turns to be compared."""
        counted = min(self.chains.num_turns, self.trees.num_turns) - 1
        if counted <= 0:
            return False
        error = _relative_error(num_requests, _TURN * counted)
        if counted >= _FIRST_TURNS and error <= _FIRST_ERROR:
            return True
        if counted < _FIRST_TURNS - 1 or not self.chains.duration or not self.trees.duration:
            return False
        low, high = sorted((self.chains.goodput, self.trees.goodput))
        return low * (1.0 + 2.0 * error) < high * (1.0 - 2.0 * error)

    def observe(self, tokens: float, duration: float) -> None:
        """Add a step of the current turn's shape."""
        self.chains.forget()
        self.trees.forget()
        (self.trees if self.branches else self.chains).observe(tokens, duration)

    def as_prior(self) -> _Record:
        """The beginning of another batch size."""
        return _Record(self.chains.as_prior(), self.trees.as_prior(), is_settled=True)
