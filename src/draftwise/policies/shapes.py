"""Whether drafts are chains or token trees: the shape with the better goodput on this machine.

A tree gains more tokens per step than a chain, and its step takes longer. Which is more depends on
the models, the text, the load, and on how long a pass over more tokens takes. So both are measured,
at each batch size. They take turns at first. Later, the worse one gets a turn when so few of its
steps are recent that it may have become the better one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from draftwise.policies.nearest import record_of
from draftwise.policies.offers import batch_bucket

# Number of steps of a turn.
_TURN = 8
# Weight of a step relative to the step after it.
_FORGETTING = 0.998
# Standard deviation of a step's tokens per request, and of its duration, relative to their means.
_SPREAD_OF_TOKENS, _SPREAD_OF_SECONDS = 0.6, 0.1
# A batch size that is new begins with what the nearest known one has measured, as at most so many
# steps.
_PRIOR_STEPS = 8.0
# Durations are clipped to this factor of their mean. A pause of the machine says nothing.
_MOST_UNUSUAL = 3.0
# Number of turns after which trees that were never measured are given up. Chains never are.
_MOST_TURNS = 3


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
            batch_bucket(num_requests),
            lambda record: record.is_known,
            lambda known: _Record(_Shape(), _Shape()) if known is None else known.as_prior(),
        )


@dataclass
class _Shape:
    """Recent steps of one shape, as sums.

    Attributes:
        steps: number of steps.
        tokens: tokens per request that they gained.
        duration: their relative duration.
        num_turns: number of turns so far.
        is_warm: whether it had a step. The first one may compile kernels, and is left out.
    """

    steps: float = 0.0
    tokens: float = 0.0
    duration: float = 0.0
    num_turns: int = 0
    is_warm: bool = False

    def forget(self) -> None:
        """Give all steps less weight."""
        self.steps *= _FORGETTING
        self.tokens *= _FORGETTING
        self.duration *= _FORGETTING

    def observe(self, tokens: float, duration: float) -> None:
        """Add a step."""
        if not self.is_warm:
            self.is_warm = True
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
            weight * self.steps, weight * self.tokens, weight * self.duration, is_warm=True
        )

    def optimistic_goodput(self, num_requests: int) -> float:
        """The goodput, plus one standard error; infinite without any step."""
        if not self.duration:
            return math.inf
        variance = _SPREAD_OF_TOKENS**2 / num_requests + _SPREAD_OF_SECONDS**2
        return self.tokens / self.duration * (1.0 + math.sqrt(variance / self.steps))


@dataclass
class _Record:
    """Both shapes at similar batch sizes.

    Attributes:
        chains, trees: recent steps of both.
        branches: whether the current turn is that of trees.
        steps_left: number of steps until the turn ends.
    """

    chains: _Shape
    trees: _Shape
    branches: bool = field(default=True, init=False)
    steps_left: int = field(default=0, init=False)

    @property
    def is_known(self) -> bool:
        """Whether both shapes were measured."""
        return self.chains.duration > 0 and self.trees.duration > 0

    def begin_turn(self, num_requests: int) -> None:
        """Give the next turn to the shape that may be best; the first one to chains."""
        chains = self.chains.optimistic_goodput(num_requests)
        trees = self.trees.optimistic_goodput(num_requests)
        given_up = not self.trees.duration and self.trees.num_turns >= _MOST_TURNS
        self.branches = not given_up and trees > chains
        self.steps_left = _TURN
        (self.trees if self.branches else self.chains).num_turns += 1

    def observe(self, tokens: float, duration: float) -> None:
        """Add a step of the current turn's shape."""
        self.chains.forget()
        self.trees.forget()
        (self.trees if self.branches else self.chains).observe(tokens, duration)

    def as_prior(self) -> _Record:
        """The beginning of another batch size."""
        return _Record(self.chains.as_prior(), self.trees.as_prior())
