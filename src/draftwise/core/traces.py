"""Drafts as they went: what was expected of each token, and what the target thought of it.

Every way of running can be tried on the same recorded drafts, so that ways are compared without the
chance that drafts differ, and with whatever dependence there is between the tokens of one draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Drafts that are imagined as long as nothing is recorded; fewer recorded ones are filled up to so
# many. What is imagined knows nothing of good tokens that follow good ones: long drafts look worse.
_NUM_IMAGINED, _ENOUGH_RECORDED = 256, 64
# Recorded drafts, and how many of one step at most: a large batch in a row tells less. Drafts are
# forgotten after so many steps, as long as enough are left: the workload changes.
_CAPACITY = 512
_PER_STEP = 8
_MEMORY_STEPS = 500
_ENOUGH_RECENT = 256
# So many must have gone on for others to be continued as they were, and a draft is continued as
# one of so many that were alike.
_ENOUGH = 24
_ALIKE = 5


@dataclass(frozen=True)
class Traces:
    """Drafts that are all of the same length.

    Attributes:
        expected: ``[traces, length]`` predicted acceptance of each token, given those before it.
        acceptance: ``[traces, length]`` the probability that each is kept if those before it are;
            above 1 where block verification makes up for an unlikely token before.
    """

    expected: Floats
    acceptance: Floats

    def __len__(self) -> int:
        return len(self.expected)


def imagined(outlook: Floats, length: int, count: int) -> Traces:
    """Drafts of independent tokens whose acceptance is predicted exactly; always the same ones.

    Every column holds each value of the outlook about equally often, in an order of its own.

    Args:
        outlook: ``[n]`` equally likely acceptance probabilities.
        length: of the drafts.
        count: how many drafts.
    """
    generator = np.random.default_rng(0)
    values = np.tile(outlook, -(-count // len(outlook)))
    columns = [generator.permutation(values)[:count] for _ in range(length)]
    drafts = np.stack(columns, axis=1) if columns else np.ones((count, 0))
    return Traces(drafts, drafts)


class TraceMemory:
    """The latest drafts, continued to full length where they ended early.

    A draft that ended after token j goes on as one of the recorded drafts did that went on and of
    whose token j about as much was expected. As long as few did, and until drafts are recorded at
    all, drafts are :func:`imagined`.
    """

    def __init__(self, length: int) -> None:
        """Remember nothing yet of drafts of up to ``length`` tokens."""
        self._expected = np.zeros((_CAPACITY, length))
        self._acceptance = np.zeros((_CAPACITY, length))
        self._lengths = np.zeros(_CAPACITY, dtype=np.int64)
        self._steps = np.zeros(_CAPACITY, dtype=np.int64)
        self._step = 0
        self._count = 0
        self._next = 0
        self._turn = 0

    def observe(
        self,
        step: int,
        expected: Floats,
        acceptance: Floats,
        lengths: Integers,
        first: Sequence[int] = (),
    ) -> None:
        """Record the drafts of a step, of a large batch those whose turn it is.

        Args:
            step: its number.
            expected: ``[batch, width]`` predicted acceptance.
            acceptance: ``[batch, width]`` as of :class:`Traces`; of tokens that were not verified
                the best that is known.
            lengths: ``[batch]`` how many tokens were drafted; those without are left out.
            first: requests to be recorded in any case.
        """
        rows = np.flatnonzero(lengths)
        if len(rows) > _PER_STEP:
            chosen = np.isin(rows, np.asarray(first))
            others = rows[~chosen]
            count = max(_PER_STEP - int(chosen.sum()), 0)
            turn = (self._turn + np.arange(count)) % len(others)
            self._turn += count
            rows = np.concatenate([rows[chosen], others[turn]])
        width = min(expected.shape[1], self._expected.shape[1])
        places = (self._next + np.arange(len(rows))) % _CAPACITY
        self._expected[places, :width] = expected[rows, :width]
        self._acceptance[places, :width] = acceptance[rows, :width]
        self._lengths[places] = np.minimum(lengths[rows], width)
        self._steps[places] = self._step = step
        self._next = int((self._next + len(rows)) % _CAPACITY)
        self._count = min(self._count + len(rows), _CAPACITY)

    def recall(self, outlook: Floats) -> Traces:
        """All drafts at full length.

        Args:
            outlook: ``[n]`` equally likely acceptance probabilities, where nothing is recorded.
        """
        length = self._expected.shape[1]
        rows = self._recent()
        if not len(rows):
            return imagined(outlook, length, _NUM_IMAGINED)
        count = max(len(rows), _ENOUGH_RECORDED)
        start = imagined(outlook, length, count)
        expected, acceptance = start.expected.copy(), start.acceptance.copy()
        ends = np.full(count, length)
        ends[: len(rows)] = self._lengths[rows]
        known = np.arange(length) < ends[: len(rows), None]
        expected[: len(rows)][known] = self._expected[rows][known]
        acceptance[: len(rows)][known] = self._acceptance[rows][known]
        recorded = np.arange(count) < len(rows)
        for place in range(1, length):
            ended = np.flatnonzero(ends <= place)
            models = np.flatnonzero(recorded & (ends > place))
            if not len(ended) or len(models) < _ENOUGH:
                continue
            chosen = _alike(expected[models, place - 1], expected[ended, place - 1])
            expected[ended, place] = expected[models[chosen], place]
            acceptance[ended, place] = acceptance[models[chosen], place]
        return Traces(expected, acceptance)

    def _recent(self) -> Integers:
        """Places of the drafts that count, oldest first."""
        places = (self._next - self._count + np.arange(self._count)) % _CAPACITY
        fresh = int((self._steps[places] > self._step - _MEMORY_STEPS).sum())
        recent: Integers = places[-max(fresh, min(_ENOUGH_RECENT, self._count)) :]
        return recent


def _alike(values: Floats, wanted: Floats) -> Integers:
    """``[wanted]`` indices of values close to those wanted, neighbours taking turns."""
    order = np.argsort(values, kind="stable")
    nearest = np.searchsorted(values[order], wanted)
    shift = np.arange(len(wanted)) % _ALIKE - _ALIKE // 2
    chosen: Integers = order[np.clip(nearest + shift, 0, len(values) - 1)]
    return chosen
