"""Goodput: what a token more is worth, and when it is not worth its time.

Goodput is tokens gained per second. The best ratio of expectations E[tokens]/E[seconds] is reached
by maximising E[tokens] − λ·E[seconds] with λ the best goodput itself (Dinkelbach 1967, "On
nonlinear fractional programming"). With λ as a price every request decides by itself: a token is
verified while the probability that it is reached and kept pays for its place in the target's pass,
and another one is drafted while what it may bring pays for a pass of the draft.

The time of a pass is not convex in its tokens (kernels come in sizes), so that following the slope
can end in a local best, far from the best. Therefore whole ways of running are compared, each with
the goodput it promises at the acceptance that is expected: see :func:`promises`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwise.core.traces import Traces

Floats = NDArray[np.float64]
Thresholds = Callable[[float], Floats]

_SMALLEST = 1e-3
_GRID = np.linspace(np.log(_SMALLEST), 0.0, 48)


def expected_accepted(acceptance: float, num_tokens: int) -> float:
    """α + α² + … + α^γ: tokens accepted of γ drafted, each with probability α given the one before.

    Leviathan et al. 2023, equation 1, without the token that the target adds.
    """
    if acceptance >= 1.0:
        return float(num_tokens)
    return acceptance * (1.0 - acceptance**num_tokens) / (1.0 - acceptance)


def worth_drafting(
    outlook: Floats, verify_price: float, draft_prices: Floats, max_draws: int
) -> Floats:
    """From which probability on that all tokens so far are kept one more draft pays.

    With w the probability that all tokens so far are kept and P the acceptance of the next one, of
    which only the distribution is known, the value of being allowed k more draws is

        V_0(w) = 0,   V_k(w) = −d + E_P[ wP ≥ c : wP − c + max(0, V_{k−1}(wP)) ]

    for a verification price c and a draft price d: a token is verified if its wP reaches c, and
    drafting ends where it does not. V_k rises with w, so "draft" is a threshold on w.

    Args:
        outlook: ``[n]`` equally likely values of P.
        verify_price: c, in tokens: λ times the seconds of one token more in the target's pass.
        draft_prices: ``[m]`` values of d, in tokens: λ times a request's share of one draft pass.
        max_draws: longest draft.

    Returns:
        ``[m, max_draws + 1]``: entry k is the w from which V_k is positive, infinite if none is.
    """
    reach = np.exp(_GRID)
    after = reach[:, None] * outlook[None, :]
    kept = after >= verify_price
    gain = np.where(kept, after - verify_price, 0.0).mean(axis=1, keepdims=True)
    later = _expected_between(after, kept)
    value = np.zeros((max_draws + 1, len(reach), len(draft_prices)))
    for draws in range(1, max_draws + 1):
        value[draws] = gain - draft_prices + later @ np.maximum(value[draws - 1], 0.0)
    first = np.argmax(value > 0, axis=1, keepdims=True)
    low, high = (np.take_along_axis(value, at, 1) for at in (np.maximum(first - 1, 0), first))
    # The zero between two points of the grid; never above 1, where a draft begins.
    share = np.divide(-low, high - low, out=np.zeros_like(low), where=high > low)
    zero = np.exp(_GRID[0] + (first - 1 + share) * (_GRID[1] - _GRID[0]))
    thresholds: Floats = np.where(high > 0, np.where(first == 0, 0.0, zero), np.inf)
    return np.ascontiguousarray(thresholds[:, 0].T)


def _expected_between(after: Floats, counts: NDArray[np.bool_]) -> Floats:
    """``[grid, grid]`` that turns a function on the grid into its means.

    Args:
        after: ``[grid, n]`` equally likely places of the function's argument, for each mean.
        counts: ``[grid, n]`` where else than at those places the function is taken to be 0; it is
            below the grid, too.
    """
    size, count = after.shape
    place = (np.log(np.maximum(after, 1e-12)) - _GRID[0]) / (_GRID[1] - _GRID[0])
    below = np.clip(place.astype(np.int64), 0, size - 2)
    weight = (counts & (place >= 0)) / count
    upper = weight * (place - below)
    at = below + size * np.arange(size)[:, None]
    means = np.zeros(size * size)
    np.add.at(means, at, weight - upper)
    np.add.at(means, at + 1, upper)
    return means.reshape(size, size)


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
    """A way of running a batch.

    Attributes:
        max_length: most tokens drafted for a request.
        threshold: a token is verified if the probability that it is reached and kept is at least
            this, and after the first token drafting goes on only while it pays; 0 drafts and
            verifies ``max_length`` tokens for everybody.
    """

    max_length: int
    threshold: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What a step costs, in seconds.

    Attributes:
        target: of a pass over so many tokens, requests included.
        draft: of a pass for so many requests.
    """

    target: Callable[[float], float]
    draft: Callable[[float], float]


# Five equally likely values of a standard normal variable.
_NORMAL = (-1.28, -0.52, 0.0, 0.52, 1.28)


@dataclass(frozen=True)
class Promise:
    """What a step is expected to bring and to cost.

    Attributes:
        tokens: gained over the batch, those that the target adds included.
        seconds: of the step.
        size: tokens in the target's pass.
        requests: in the batch.
    """

    tokens: float
    seconds: float
    size: float
    requests: int

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def promises(
    points: Sequence[OperatingPoint],
    num_requests: int,
    traces: Traces,
    costs: Costs,
    draft_thresholds: Thresholds,
) -> list[Promise]:
    """What ways of running promise.

    Args:
        points: the ways.
        num_requests: in the batch.
        traces: drafts to try them on.
        costs: of passes.
        draft_thresholds: from a verification threshold above 0 to ``[num_requests + 1, draws + 1]``
            probabilities that a draft must have reached for one more draw to pay, by how many
            draft and how many draws are left.
    """
    lengths = np.array([point.max_length for point in points], dtype=np.int64)
    thresholds = np.array([point.threshold for point in points])
    longest, ways = int(lengths.max(initial=0)), np.arange(len(points))
    needed = np.zeros((len(points), num_requests + 1, longest + 1))
    for threshold in set(thresholds[thresholds > 0].tolist()):
        table = draft_thresholds(threshold)
        needed[thresholds == threshold] = table[: num_requests + 1, : longest + 1]
    expected: Floats = np.cumprod(traces.expected[:, :longest], axis=1, dtype=np.float64)
    reached = np.minimum(np.cumprod(traces.acceptance[:, :longest], axis=1), 1.0)
    drafting = np.ones((len(points), len(traces)), dtype=bool)
    verified = np.zeros(drafting.shape, dtype=np.int64)
    gained = np.zeros(len(points))
    seconds = np.zeros(len(points))
    for place in range(longest):
        left = lengths - place
        if place > 0:
            share = np.maximum(1, np.rint(num_requests * drafting.mean(axis=1)).astype(np.int64))
            pays = needed[ways, share, np.maximum(left, 0)]
            drafting &= expected[:, place - 1] >= pays[:, None]
        drafting[left <= 0] = False
        active = drafting.mean(axis=1)
        for way in np.flatnonzero(active).tolist():
            # A pass is run if anybody drafts at all.
            runs = 1.0 - (1.0 - active[way]) ** num_requests
            seconds[way] += runs * costs.draft(num_requests * active[way] / runs)
        drafting &= expected[:, place] >= thresholds[:, None]
        verified += drafting
        gained += drafting @ reached[:, place] / len(traces)
    sizes = num_requests * (1.0 + verified.mean(axis=1))
    spreads = np.sqrt(num_requests * verified.var(axis=1))
    result = []
    for way, (size, spread) in enumerate(zip(sizes.tolist(), spreads.tolist(), strict=True)):
        passes = [max(float(num_requests), size + normal * spread) for normal in _NORMAL]
        target = sum(map(costs.target, passes)) / len(passes)
        tokens = num_requests * (1.0 + float(gained[way]))
        result.append(Promise(tokens, float(seconds[way]) + target, size, num_requests))
    return result


class Outlook:
    """The distribution of predicted acceptance, followed with exponential forgetting."""

    _BINS = 32

    def __init__(self, guess: float = 0.6, forgetting: float = 0.999) -> None:
        """Start from a spread around a guess.

        Args:
            guess: mean acceptance, 0 … 1.
            forgetting: weight of an old token against one after it that was surely reached.
        """
        self._forgetting = forgetting
        centres = (np.arange(self._BINS) + 0.5) / self._BINS
        beta = centres ** (5 * guess - 1) * (1 - centres) ** (4 - 5 * guess)
        start = beta / beta.sum() + 0.1 / self._BINS
        self._weight = start / start.sum() * 20.0
        self._sum = self._weight * centres

    def observe(self, predictions: Floats, weights: Floats) -> None:
        """Take note of predictions ``[n]`` with weights ``[n]``."""
        if not len(predictions):
            return
        index = np.minimum((predictions * self._BINS).astype(np.int64), self._BINS - 1)
        kept = self._forgetting ** float(weights.sum())
        self._weight *= kept
        self._sum *= kept
        np.add.at(self._weight, index, weights)
        np.add.at(self._sum, index, weights * predictions)

    def values(self, count: int = 16) -> Floats:
        """``[count]`` equally likely values: means of the distribution's equal parts."""
        means = self._sum / np.maximum(self._weight, 1e-12)
        ends = np.cumsum(self._weight) / self._weight.sum()
        starts = np.concatenate([[0.0], ends[:-1]])
        edges = np.arange(count + 1) / count
        low = np.maximum(starts[None, :], edges[:-1, None])
        high = np.minimum(ends[None, :], edges[1:, None])
        share = np.clip(high - low, 0.0, None) * count
        values: Floats = share @ means
        return values
