"""Goodput of operating points: what a step is expected to gain and to take.

Goodput is tokens gained per second. An operating point says how a batch is run: how far each
request drafts, and from which probability on a drafted token is verified. Every operating point is
tried on the same recorded drafts, so that the comparison contains no chance between drafts and
keeps the dependence between the tokens of a draft.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def expected_accepted(acceptance: float, num_tokens: int) -> float:
    """α + α² + … + α^γ: tokens accepted of γ drafted, each with probability α given the one before.

    Leviathan et al. 2023, equation 1, without the token that the target adds.
    """
    if acceptance >= 1.0:
        return float(num_tokens)
    return acceptance * (1.0 - acceptance**num_tokens) / (1.0 - acceptance)


def advised_draft_length(mean_accepted: float, num_drafted: int) -> int:
    """How many tokens to draft, from what an operator sees at a fixed draft length.

    An average of 3 accepted at γ = 10 says about 4: drafts are cut short after three tokens, one
    more allows for the good ones. When nearly all are accepted the draft could be longer.

    Args:
        mean_accepted: drafted tokens accepted per step, the corrected or bonus token not counted.
        num_drafted: γ, tokens drafted per step.

    Returns:
        At least 1; at most twice ``num_drafted``.
    """
    if not 0 <= mean_accepted <= num_drafted or num_drafted < 1:
        raise ValueError("needs 0 <= mean_accepted <= num_drafted and num_drafted >= 1")
    if mean_accepted >= 0.9 * num_drafted:
        return 2 * num_drafted
    return max(1, min(num_drafted, round(mean_accepted) + 1))


@dataclass(frozen=True)
class OperatingPoint:
    """How a batch is run.

    Attributes:
        max_length: most tokens drafted for a request.
        threshold: a request drafts on while the probability that all its drafted tokens are kept is
            at least this, and a token is verified under the same condition. 0 drafts and verifies
            ``max_length`` tokens for every request.
    """

    max_length: int
    threshold: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What passes cost, in seconds.

    Attributes:
        target: of the target's pass, by its tokens: drafted ones and one per request.
        draft: of a pass of the draft, by the requests that draft.
    """

    target: Callable[[float], float]
    draft: Callable[[float], float]


@dataclass(frozen=True)
class StepEstimate:
    """What a step is expected to gain and to take.

    Attributes:
        tokens: gained over the batch, those that the target adds included.
        seconds: of the step.
        size: tokens in the target's pass.
    """

    tokens: float
    seconds: float
    size: float

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def step_estimates(
    points: Sequence[OperatingPoint],
    num_requests: int,
    expected: Floats,
    acceptance: Floats,
    costs: Costs,
) -> list[StepEstimate]:
    """What a step at each operating point is expected to gain and to take.

    Args:
        points: to estimate.
        num_requests: in the batch.
        expected: ``[drafts, length]`` predicted acceptance of each token, given those before it.
        acceptance: ``[drafts, length]`` the probability that each token is kept if those before it
            are; above 1 where block verification makes up for an unlikely token before.
        costs: of passes.
    """
    reached = np.cumprod(expected, axis=1)
    kept = np.minimum(np.cumprod(acceptance, axis=1), 1.0)
    result = []
    for point in points:
        # A token that is verified has been reached, and so were all before it.
        verified = reached[:, : point.max_length] >= point.threshold
        share = verified.mean(axis=0)
        gained = float((kept[:, : point.max_length] * verified).sum(axis=1).mean())
        size = num_requests * (1.0 + float(share.sum()))
        seconds = costs.target(size)
        for drafting in (1.0, *share[:-1].tolist())[: point.max_length]:
            # A pass is run if any request drafts.
            runs = 1.0 - (1.0 - drafting) ** num_requests
            seconds += runs * costs.draft(num_requests * drafting / runs) if runs else 0.0
        result.append(StepEstimate(num_requests * (1.0 + gained), seconds, size))
    return result


class DraftMemory:
    """The latest drafts, at full length.

    Where a draft ended early, and before drafts are recorded, tokens are made up: they are
    independent, and as likely to be accepted as the recorded ones were predicted to be.
    """

    def __init__(self, num_drafts: int, length: int, acceptance_guess: float) -> None:
        """Remember nothing yet.

        Args:
            num_drafts: that are remembered.
            length: of whole drafts.
            acceptance_guess: mean acceptance before any draft is recorded, above 0 and below 1.
        """
        shape = num_drafts, length
        generator = np.random.default_rng(0)
        uniform = (np.arange(num_drafts) + 0.5) / num_drafts
        columns = [generator.permutation(uniform) for _ in range(length)]
        self._uniforms = np.stack(columns, axis=1) if columns else np.zeros(shape)
        # U^a has the mean 1 / (1 + a).
        self.expected: Floats = self._uniforms ** (1 / acceptance_guess - 1)
        self.acceptance: Floats = self.expected.copy()
        self._recorded = np.zeros(shape, dtype=bool)
        self._next = 0

    def observe(self, expected: Floats, acceptance: Floats, lengths: Integers) -> None:
        """Record the drafts of a step.

        Args:
            expected: ``[batch, width]`` predicted acceptance.
            acceptance: ``[batch, width]`` as of :func:`step_estimates`; of tokens that were not
                verified the best that is known.
            lengths: ``[batch]`` how many tokens were drafted; requests with none are left out.
        """
        drafted = np.flatnonzero(lengths)
        width = min(expected.shape[1], self.expected.shape[1])
        places = (self._next + np.arange(len(drafted))) % len(self.expected)
        self._next = (self._next + len(drafted)) % len(self.expected)
        self._recorded[places] = False
        self._recorded[places, :width] = np.arange(width) < lengths[drafted, None]
        self.expected[places, :width] = expected[drafted, :width]
        self.acceptance[places, :width] = acceptance[drafted, :width]

    def complete(self) -> None:
        """Make up the tokens that are not recorded, from the distribution of those that are."""
        if not self._recorded.any():
            return
        before = np.cumprod(np.where(self._recorded, self.expected, 1.0), axis=1)
        weights = np.ones_like(before)
        weights[:, 1:] = before[:, :-1]
        values, weights = self.expected[self._recorded], weights[self._recorded]
        order = np.argsort(values)
        share = np.cumsum(weights[order])
        missing = ~self._recorded
        at = np.searchsorted(share, self._uniforms[missing] * share[-1])
        self.expected[missing] = self.acceptance[missing] = values[order][at]


def kind_of(point: OperatingPoint) -> tuple[bool, bool]:
    """Whether anything is drafted, and whether a threshold selects."""
    return point.max_length > 0, point.threshold > 0


class StepTimeCorrections:
    """How much longer steps take than their passes cost, by operating point, at one batch size.

    Selecting takes time and ragged batches are less regular, which no cost of a pass says. The log
    of realised over computed seconds is the pace of the machine, which all points share, plus the
    point's own correction. Medians keep pauses of the machine out of both.
    """

    def __init__(self, prior_steps: int, memory: int) -> None:
        """Nothing is known yet.

        Args:
            prior_steps: steps of its own that count as much as what is known of a point otherwise.
            memory: steps that are remembered.
        """
        self._prior = prior_steps
        self._memory = memory
        self._excess: dict[OperatingPoint, deque[tuple[int, float]]] = {}
        self._paces: deque[float] = deque([0.0], maxlen=self._prior)
        self._own: dict[OperatingPoint, float] = {}

    def observe(self, step: int, point: OperatingPoint, ratio: float, is_incumbent: bool) -> None:
        """How long a step took.

        Args:
            step: its number.
            point: how it was run.
            ratio: realised over computed seconds; what is not positive and finite is ignored.
            is_incumbent: whether the point is the one in use, and no challenger: it shows the pace.
        """
        if not 0 < ratio < math.inf:
            return
        if is_incumbent:
            self._paces.append(math.log(ratio) - self._own.get(point, 0.0))
        excess = math.log(ratio) - median(self._paces)
        self._excess.setdefault(point, deque(maxlen=self._memory)).append((step, excess))

    def update(
        self, step: int, points: Sequence[OperatingPoint], incumbent: OperatingPoint
    ) -> None:
        """Estimate the corrections of all points, without what is older than the memory.

        What the incumbent takes longer is put down to the machine: points of which nothing is known
        are expected to take as much longer.
        """
        for point, steps in self._excess.items():
            recent = (each for each in steps if each[0] > step - self._memory)
            self._excess[point] = deque(recent, self._memory)
        for point in points:
            alike = [p for p in self._excess if kind_of(p) == kind_of(point)]
            self._own[point] = self._shrunk([point], self._shrunk(alike, 0.0))
        shift = self._own[incumbent]
        for point, steps in self._excess.items():
            moved = ((number, excess - shift) for number, excess in steps)
            self._excess[point] = deque(moved, self._memory)
        self._own = {point: own - shift for point, own in self._own.items()}
        self._paces = deque((pace + shift for pace in self._paces), self._prior)

    def num_steps(self, point: OperatingPoint) -> int:
        """Remembered steps at a point."""
        return len(self._excess.get(point, ()))

    def factor(self, point: OperatingPoint) -> float:
        """By which the computed seconds of a point are to be multiplied."""
        return math.exp(median(self._paces) + self._own.get(point, 0.0))

    def _shrunk(self, points: Sequence[OperatingPoint], prior: float) -> float:
        values = [excess for p in points for _, excess in self._excess.get(p, ())]
        if not values:
            return prior
        return (len(values) * median(values) + self._prior * prior) / (len(values) + self._prior)
