"""A policy's decisions as numbers, for backends that apply them without calling the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwise.core.types import Draft

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DraftRule:
    """A policy's drafting and verification decisions as numbers.

    A backend that applies the rule does not call the policy after each token.

    The acceptance probability P of a drafted token is σ(Σ weightₖ·vₐ·v_b), clipped to the bounds,
    with one pair of variables (a, b) per feature. The variables are 1, l = log max(q(x), smallest),
    h = min(H, largest), history, min(i, last)/last for position i, and two that are 0 without a
    companion. A request continues drafting while the product of its P reaches its threshold. A
    token is verified if its unclipped P, times the product of the P before it, reaches the
    threshold. A token is also verified if the P that this requires is at most ``unfiltered_limit``.
    The log-odds are a quadratic function of l, so the verified tokens have q(x) in a range. If two
    ranges satisfy the condition, the upper one is used.

    Attributes:
        weights: ``[2, features]`` float64, weights for sampled and for greedy requests.
        pairs: ``[features, 2]`` int64, the two variables of each feature.
        smallest_token_prob, largest_entropy, last_position: limits of q(x), H and i.
        bounds: lower and upper bound of P.
        greedy: ``[batch]`` bool, whether each request is decoded at temperature 0.
        history: ``[batch]`` float64, recent mean acceptance of each request.
        thresholds: ``[batch]`` float64; with 0 a request drafts to its limit and verifies all
            drafted tokens.
        unfiltered_limit: largest required P at which a position is not filtered.
        min_required: the required P of a filtered position is clipped to at least this, and to at
            most one minus this.
        results: arrays that the backend fills while it applies the rule.
    """

    weights: Floats
    pairs: NDArray[np.int64]
    smallest_token_prob: float
    largest_entropy: float
    last_position: int
    bounds: tuple[float, float]
    greedy: NDArray[np.bool_]
    history: Floats
    thresholds: Floats
    unfiltered_limit: float
    min_required: float
    results: RuleResults


@dataclass(frozen=True)
class RuleResults:
    """The results of applying a :class:`DraftRule`.

    Attributes:
        expected: ``[batch, longest]`` float64, P of each drafted token.
        prefix_acceptance_prob: ``[batch]`` float64, the product of each request's P; initially 1.
        least, most: ``[batch, longest]`` float32, smallest and largest q(x) at which a token is
            verified. Initially 0 and infinity; they stay so for greedy requests.
        kept: ``[batch]`` int64, number of leading tokens that are verified; -1 if the rule was not
            applied to the request.
    """

    expected: Floats
    prefix_acceptance_prob: Floats
    least: NDArray[np.float32]
    most: NDArray[np.float32]
    kept: NDArray[np.int64]

    @classmethod
    def initial(cls, num_requests: int, longest: int) -> RuleResults:
        """The results before any token is drafted."""
        return cls(
            np.zeros((num_requests, longest)),
            np.ones(num_requests),
            np.zeros((num_requests, longest), dtype=np.float32),
            np.full((num_requests, longest), np.inf, dtype=np.float32),
            np.full(num_requests, -1, dtype=np.int64),
        )

    def cover(self, draft: Draft) -> bool:
        """Whether the rule was applied to all requests of a draft that drafted tokens."""
        return bool((self.kept[np.asarray(draft.lengths) > 0] >= 0).all())

    def part(self, indices: Sequence[int]) -> RuleResults:
        """A copy of the results of the given requests."""
        at = np.asarray(indices, dtype=np.int64)
        return RuleResults(*(values[at] for values in vars(self).values()))

    def put(self, indices: Sequence[int], part: RuleResults) -> None:
        """Replace the results of the given requests."""
        at = np.asarray(indices, dtype=np.int64)
        for name, values in vars(self).items():
            values[at] = getattr(part, name)
