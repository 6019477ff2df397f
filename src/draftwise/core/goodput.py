"""Goodput: what a token more is worth, and when it is not worth its time.

Goodput is tokens gained per second. The best ratio of expectations E[tokens]/E[seconds] is reached
by maximising E[tokens] − λ·E[seconds] with λ the best goodput itself (Dinkelbach 1967, "On
nonlinear fractional programming"). With λ as a price every request decides by itself: a token is
verified while the probability that it is reached and kept pays for its place in the target's pass,
and another one is drafted while what it may bring pays for a pass of the draft.

The time of a pass is not convex in its tokens (kernels come in sizes), so that following the slope
can end in a local best, far from the best. Therefore whole ways of running are compared, each with
the goodput it promises at the acceptance that is expected: see :func:`promised_goodput`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwise.core.traces import Traces

Floats = NDArray[np.float64]
Thresholds = Callable[[float, int], Floats]

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
    outlook: Floats, verify_price: float, draft_price: float, max_draws: int
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
        draft_price: d, in tokens: λ times a request's share of one draft pass.
        max_draws: longest draft.

    Returns:
        ``[max_draws + 1]``: entry k is the w from which V_k is positive, infinite if none is.
    """
    reach = np.exp(_GRID)
    after = reach[:, None] * outlook[None, :]
    log_after = np.log(np.maximum(after, 1e-12))
    gain = np.where(after >= verify_price, after - verify_price, 0.0)
    thresholds = np.full(max_draws + 1, np.inf)
    value = np.zeros_like(reach)
    for draws in range(1, max_draws + 1):
        later = np.interp(log_after, _GRID, np.maximum(value, 0.0), left=0.0)
        value = -draft_price + (gain + np.where(after >= verify_price, later, 0.0)).mean(axis=1)
        positive = np.flatnonzero(value > 0)
        if len(positive):
            first = positive[0]
            # The zero between two points of the grid; never above 1, where a draft begins.
            if first == 0:
                thresholds[draws] = 0.0
            else:
                share = -value[first - 1] / (value[first] - value[first - 1])
                step = _GRID[first] - _GRID[first - 1]
                thresholds[draws] = np.exp(_GRID[first - 1] + share * step)
    return thresholds


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


def promised_goodput(
    point: OperatingPoint,
    num_requests: int,
    traces: Traces,
    costs: Costs,
    draft_thresholds: Thresholds,
) -> Promise:
    """What a way of running promises.

    Args:
        point: the way.
        num_requests: in the batch.
        traces: drafts to try it on.
        costs: of passes.
        draft_thresholds: from a verification threshold and a number of requests to the
            probability that a draft must have reached for one more draw to pay, by draws left.
    """
    count = len(traces)
    expected: Floats = np.cumprod(traces.expected[:, : point.max_length], axis=1, dtype=np.float64)
    reached = np.minimum(np.cumprod(traces.acceptance[:, : point.max_length], axis=1), 1.0)
    drafting = np.ones(count, dtype=bool)
    before: Floats = np.ones(count)
    verified = np.zeros(count)
    gained = np.zeros(count)
    seconds = 0.0
    for place in range(point.max_length):
        if point.threshold > 0 and place > 0:
            share = max(1, round(num_requests * drafting.mean()))
            needed = draft_thresholds(point.threshold, share)[point.max_length - place]
            drafting &= before >= needed
        active = float(drafting.mean())
        if active == 0:
            break
        # A pass is run if anybody drafts at all.
        runs = 1.0 - (1.0 - active) ** num_requests
        seconds += runs * costs.draft(num_requests * active / runs)
        before = expected[:, place]
        drafting &= before >= point.threshold
        verified += drafting
        gained += np.where(drafting, reached[:, place], 0.0)
    mean = num_requests * (1.0 + float(verified.mean()))
    spread = float(np.sqrt(num_requests * verified.var()))
    sizes = [max(float(num_requests), mean + normal * spread) for normal in _NORMAL]
    seconds += sum(costs.target(size) for size in sizes) / len(sizes)
    return Promise(num_requests * (1.0 + float(gained.mean())), seconds, mean, num_requests)


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
