"""Goodput of operating points: the expected tokens and seconds of a step.

Goodput is tokens gained per second. An operating point defines how a batch is run: the maximum
draft length, and the minimum probability at which a drafted token is verified. All operating points
are evaluated on the same recorded drafts. So the comparison contains no random difference between
drafts, and it keeps the dependence between the tokens of a draft.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def expected_accepted(acceptance: float, num_tokens: int) -> float:
    """Expected number of accepted tokens among γ drafted tokens: α + α² + … + α^γ.

    Each token is accepted with probability α if the token before it is. Leviathan et al. 2023,
    equation 1, without the token that the target adds.
    """
    if acceptance >= 1.0:
        return float(num_tokens)
    return acceptance * (1.0 - acceptance**num_tokens) / (1.0 - acceptance)


def advised_draft_length(mean_accepted: float, num_drafted: int) -> int:
    """Recommend a draft length from statistics at a fixed draft length.

    With 3 tokens accepted on average at γ = 10, the recommendation is 4. The average draft is
    rejected after three tokens, and one more token allows for better drafts. If nearly all tokens
    are accepted, a longer draft is recommended.

    Args:
        mean_accepted: mean number of drafted tokens accepted per step, without the corrected or
            bonus token.
        num_drafted: γ, the number of tokens drafted per step.

    Returns:
        The recommended draft length: at least 1, at most twice ``num_drafted``.

    Raises:
        ValueError: an argument is out of range.
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
        max_length: maximum number of tokens drafted for a request.
        threshold: minimum probability that all drafted tokens of a request are accepted. A request
            continues drafting while this holds. With 0, ``max_length`` tokens are drafted and
            verified for every request.
        verifies_all: whether all drafted tokens are verified. Otherwise a token is verified under
            the same condition, so that the last token of a draft often is not.
    """

    max_length: int
    threshold: float = 0.0
    verifies_all: bool = False


@dataclass(frozen=True)
class Costs:
    """Costs of passes, in seconds.

    Attributes:
        target: seconds of the target's pass as a function of its number of tokens: the drafted
            tokens and one for each request.
        draft: seconds of a draft pass as a function of the number of requests that draft.
        first_draft_extra: additional seconds of the first draft pass of a step.
    """

    target: Callable[[float], float]
    draft: Callable[[float], float]
    first_draft_extra: float = 0.0


@dataclass(frozen=True)
class StepEstimate:
    """Expected tokens and seconds of a step.

    Attributes:
        tokens: number of tokens gained over the batch, including the tokens that the target adds.
        seconds: duration of the step.
        size: number of tokens in the target's pass.
        passes: number of draft passes.
    """

    tokens: float
    seconds: float
    size: float
    passes: float

    @property
    def goodput(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def step_estimates(
    points: Sequence[OperatingPoint],
    num_requests: int,
    expected: Floats,
    acceptance: Floats,
    costs: Costs,
) -> list[StepEstimate]:
    """Estimate the tokens and seconds of a step at each operating point.

    Args:
        points: the operating points.
        num_requests: number of requests in the batch.
        expected: ``[drafts, length]`` predicted acceptance probability of each token if all tokens
            before it are accepted.
        acceptance: ``[drafts, length]`` acceptance probability of each token if all tokens before
            it are accepted. It is above 1 where block verification compensates for an unlikely
            earlier token.
        costs: costs of passes.
    """
    predicted = np.cumprod(expected, axis=1)
    kept = np.minimum(np.cumprod(acceptance, axis=1), 1.0)
    result = []
    for point in points:
        # If a token is verified, all tokens before it are verified too.
        likely = predicted[:, : point.max_length] >= point.threshold
        drafted = np.ones_like(likely)
        drafted[:, 1:] = likely[:, :-1]
        verified = drafted if point.verifies_all else likely
        gained = float((kept[:, : point.max_length] * verified).sum(axis=1).mean())
        size = num_requests * (1.0 + float(verified.mean(axis=0).sum()))
        seconds, passes = costs.target(size), 0.0
        if point.max_length:
            seconds += costs.first_draft_extra
        for drafting in drafted.mean(axis=0).tolist():
            # The pass runs if at least one request drafts.
            runs = 1.0 - (1.0 - drafting) ** num_requests
            passes += runs
            seconds += runs * costs.draft(num_requests * drafting / runs) if runs else 0.0
        result.append(StepEstimate(num_requests * (1.0 + gained), seconds, size, passes))
    return result


def without_worse_twins(
    estimates: Mapping[OperatingPoint, StepEstimate], incumbent: OperatingPoint
) -> list[OperatingPoint]:
    """The points of which none but the incumbent has a twin with a better estimate.

    Twins have the same threshold, and only one of them verifies all drafted tokens. Which is better
    follows from the same drafts and from the cost of a verified token. So no trial is spent on it.
    """

    def is_worse(point: OperatingPoint) -> bool:
        twin = replace(point, verifies_all=not point.verifies_all)
        if twin not in estimates:
            return False
        own, other = estimates[point].goodput, estimates[twin].goodput
        return other > own or (other == own and twin.verifies_all)

    return [point for point in estimates if point == incumbent or not is_worse(point)]


class DraftMemory:
    """The latest drafts, extended to full length.

    Tokens after the end of a short draft, and drafts that are not recorded yet, are filled with
    synthetic tokens. Synthetic tokens are independent. Their acceptance probabilities have the
    distribution of the predictions for the recorded tokens.

    Attributes:
        expected: ``[drafts, length]`` predicted acceptance probability of each token.
        acceptance: ``[drafts, length]`` acceptance probability of each token, as in
            :func:`step_estimates`.
    """

    def __init__(self, num_drafts: int, length: int, acceptance_guess: float) -> None:
        """Start with synthetic drafts only.

        Args:
            num_drafts: number of drafts that are remembered.
            length: number of tokens of a full draft.
            acceptance_guess: mean acceptance before any draft is recorded, above 0 and below 1.
        """
        shape = num_drafts, length
        generator = np.random.default_rng(0)
        uniform = (np.arange(num_drafts) + 0.5) / num_drafts
        columns = [generator.permutation(uniform) for _ in range(length)]
        self._uniforms = np.stack(columns, axis=1) if columns else np.zeros(shape)
        # The mean of U^a is 1 / (1 + a) for uniform U.
        self.expected: Floats = self._uniforms ** (1 / acceptance_guess - 1)
        self.acceptance: Floats = self.expected.copy()
        self._recorded = np.zeros(shape, dtype=bool)
        self._next = 0

    def observe(self, expected: Floats, acceptance: Floats, lengths: Integers) -> None:
        """Record the drafts of a step.

        Args:
            expected: ``[batch, width]`` predicted acceptance probability of each token.
            acceptance: ``[batch, width]`` acceptance probability of each token, as in
                :func:`step_estimates`; for tokens that were not verified, the best estimate.
            lengths: ``[batch]`` number of drafted tokens. Requests without any are ignored.
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
        """Fill in the tokens that are not recorded, from the distribution of the recorded ones."""
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


def point_kind(point: OperatingPoint) -> tuple[bool, bool]:
    """The kind of an operating point: whether it drafts, and whether it has a threshold."""
    return point.max_length > 0, point.threshold > 0


class StepTimeCorrections:
    """Step-time corrections by operating point, at one batch size.

    A correction is the ratio of observed to computed seconds of a step. It covers what the costs of
    passes do not include: selection takes time, and batches of drafts of different lengths are less
    regular. The log of the ratio is the sum of the machine's pace, which all points share, and the
    point's own correction. Both are estimated with medians, which pauses of the machine hardly
    affect.
    """

    def __init__(self, prior_steps: int, memory: int) -> None:
        """Start without corrections.

        Args:
            prior_steps: weight of the prior of a point's correction, as a number of steps at the
                point. The prior comes from points of the same kind.
            memory: number of steps that are remembered.
        """
        self._prior = prior_steps
        self._memory = memory
        self._excess: dict[OperatingPoint, deque[tuple[int, float]]] = {}
        self._paces: deque[float] = deque([0.0], maxlen=self._prior)
        self._corrections: dict[OperatingPoint, float] = {}

    def as_prior(self) -> StepTimeCorrections:
        """Corrections of another batch size, which begin with the latest steps of this one.

        They weigh no more than the prior of a point.
        """
        other = StepTimeCorrections(self._prior, self._memory)
        for point, steps in self._excess.items():
            latest = ((0, excess) for _, excess in list(steps)[-self._prior :])
            other._excess[point] = deque(latest, self._memory)
        other._paces = deque(self._paces, self._prior)
        other._corrections = dict(self._corrections)
        return other

    def observe(self, step: int, point: OperatingPoint, ratio: float, is_incumbent: bool) -> None:
        """Record the time of a step.

        Args:
            step: number of the step.
            point: operating point of the step.
            ratio: observed divided by computed seconds. A value that is not positive and finite is
                ignored.
            is_incumbent: whether the point is the one in use and not a challenger. The pace of the
                machine is estimated from steps at the point in use.
        """
        if not 0 < ratio < math.inf:
            return
        if is_incumbent:
            self._paces.append(math.log(ratio) - self._corrections.get(point, 0.0))
        excess = math.log(ratio) - median(self._paces)
        self._excess.setdefault(point, deque(maxlen=self._memory)).append((step, excess))

    def update(
        self, step: int, points: Sequence[OperatingPoint], incumbent: OperatingPoint
    ) -> None:
        """Estimate the corrections of all points, and forget steps that are older than the memory.

        The incumbent's own correction is attributed to the machine, so it applies to points without
        observations too.

        Args:
            step: number of the current step.
            points: all operating points.
            incumbent: the point in use.
        """
        for point, steps in self._excess.items():
            recent = (each for each in steps if each[0] > step - self._memory)
            self._excess[point] = deque(recent, self._memory)
        for point in points:
            same_kind = [p for p in self._excess if point_kind(p) == point_kind(point)]
            self._corrections[point] = self._shrunk([point], self._shrunk(same_kind, 0.0))
        shift = self._corrections[incumbent]
        for point, steps in self._excess.items():
            moved = ((number, excess - shift) for number, excess in steps)
            self._excess[point] = deque(moved, self._memory)
        self._corrections = {point: own - shift for point, own in self._corrections.items()}
        self._paces = deque((pace + shift for pace in self._paces), self._prior)

    def num_steps(self, point: OperatingPoint) -> int:
        """Number of remembered steps at a point."""
        return len(self._excess.get(point, ()))

    def factor(self, point: OperatingPoint) -> float:
        """Factor by which the computed seconds of a point are multiplied."""
        return math.exp(median(self._paces) + self._corrections.get(point, 0.0))

    def recent_factor(self, point: OperatingPoint, since: int, least: int) -> float | None:
        """The factor of a point by its latest steps alone.

        Args:
            point: the point.
            since: number of the first step that counts.
            least: minimum number of such steps. With fewer, the result is ``None``.
        """
        values = [excess for step, excess in self._excess.get(point, ()) if step >= since]
        if len(values) < least:
            return None
        return math.exp(median(self._paces) + median(values))

    def _shrunk(self, points: Sequence[OperatingPoint], prior: float) -> float:
        """Median excess of the steps at some points, shrunk towards a prior."""
        values = [excess for p in points for _, excess in self._excess.get(p, ())]
        if not values:
            return prior
        return (len(values) * median(values) + self._prior * prior) / (len(values) + self._prior)
