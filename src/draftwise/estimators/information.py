"""Information gain of signals about acceptance, in bits.

The information gain of a binned signal Z is I(X; Z) = H(X) − H(X | Z) (Kim et al. 2025,
"Speculative Verification"). X is the acceptance of a token: either whether it was accepted, or its
acceptance probability in ten equal bins. The entropy of a binary X is at most one bit; the binned
X can exceed that. Only tokens whose predecessors were all accepted are counted.

With few records, the empirical frequencies overestimate the gain of any signal. The corrected gain
subtracts the mean gain of the same bins over several random permutations of X.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftwise.estimators.binning import adaptive_grid, quantile_edges, uniform_grid
from draftwise.estimators.records import Booleans, Floats, Integers, Records

Fate = Literal["accepted", "acceptance"]

_NUM_FATE_BINS = 10
_NUM_QUANTILES = 20
_NUM_PERMUTATIONS = 20


@dataclass(frozen=True)
class Gain:
    """Information gain of a signal Z about X.

    Attributes:
        entropy: H(X) in bits.
        plain: I(X; Z) of the observed frequencies, in bits.
        corrected: ``plain`` minus the mean gain of permutations of X, in bits. For a signal that is
            independent of X it is about 0, with either sign.
        num_cells: number of values of Z that occur.
    """

    entropy: float
    plain: float
    corrected: float
    num_cells: int


def information_gain(fates: Integers, cells: Integers, seed: int = 0) -> Gain:
    """Information gain of one discrete signal.

    Args:
        fates: ``[n]`` values of X, from 0.
        cells: ``[n]`` values of Z, from 0.
        seed: seed of the permutations.
    """
    # Renumbering the values that occur keeps the joint table small.
    _, z = np.unique(cells, return_inverse=True)
    entropy = _entropy(np.bincount(fates))
    plain = _mutual_information(fates, z)
    random = np.random.default_rng(seed)
    by_chance = [
        _mutual_information(random.permutation(fates), z) for _ in range(_NUM_PERMUTATIONS)
    ]
    return Gain(entropy, plain, plain - float(np.mean(by_chance)), int(z.max(initial=-1)) + 1)


def information_gains(
    records: Records, fate: Fate = "accepted", has_companion: bool = True
) -> Mapping[str, Gain]:
    """Information gain of each signal in 20 quantiles, and of S and A jointly in each binning.

    Args:
        records: records of plain speculative decoding.
        fate: X: ``"accepted"`` or ``"acceptance"``.
        has_companion: whether the records contain S and A.

    Returns:
        Gain by signal: ``"H"``, ``"q(x)"``, ``"history"``, and with a companion ``"S"``, ``"A"``
        and ``"S,A 5x5"`` … for the binnings of :mod:`draftwise.estimators.tables`.
    """
    tested = records.take(was_tested(records))
    if fate == "accepted":
        x = tested.accepted.astype(np.int64)
    else:
        x = np.minimum((tested.acceptance * _NUM_FATE_BINS).astype(np.int64), _NUM_FATE_BINS - 1)
    signals = {"H": tested.entropy, "q(x)": tested.token_prob, "history": tested.history}
    if has_companion:
        signals |= {"S": tested.overlap, "A": tested.agreement}
    cells = {
        name: np.searchsorted(quantile_edges(values, _NUM_QUANTILES), values, side="right")
        for name, values in signals.items()
    }
    if has_companion:
        ones = np.ones(len(tested), dtype=np.float32)
        grids = {f"{size}x{size}": uniform_grid(size, size) for size in (5, 10, 20)}
        grids["adaptive"] = adaptive_grid(tested.overlap, tested.agreement, ones)
        for name, grid in grids.items():
            cells[f"S,A {name}"] = grid.cells_of(tested.overlap, tested.agreement)
    return {name: information_gain(x, z) for name, z in cells.items()}


def was_tested(records: Records) -> Booleans:
    """``[num_tokens]`` whether all tokens before this one in its chain were accepted."""
    tested: Booleans = records.position == 0
    tested[1:] |= records.accepted[:-1] & (records.position[1:] > 0)
    return tested


def pearson(x: Floats, y: Floats, weight: Floats | None = None) -> float:
    """Pearson's correlation coefficient; 0 if x or y is constant.

    Args:
        x: ``[n]``.
        y: ``[n]``.
        weight: ``[n]`` weight of each pair; ``None`` for 1.
    """
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    covariance = np.cov(x.astype(np.float64), y.astype(np.float64), aweights=weight)
    scale = float(np.sqrt(covariance[0, 0] * covariance[1, 1]))
    return float(covariance[0, 1]) / scale if scale > 0 else 0.0


def _mutual_information(x: NDArray[np.int64], z: NDArray[np.int64]) -> float:
    joint = _entropy(np.bincount(z * (int(x.max(initial=0)) + 1) + x))
    # Rounding must not make the result negative.
    return max(0.0, _entropy(np.bincount(x)) + _entropy(np.bincount(z)) - joint)


def _entropy(counts: NDArray[np.int64]) -> float:
    """Entropy of frequencies in bits; 0 if there are none."""
    counts = counts[counts > 0]
    if not len(counts):
        return 0.0
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
