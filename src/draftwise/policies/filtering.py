"""Filtered proposals: rules that are applied to every token that the draft might have drawn."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.types import CompanionScores, Draft, Plan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# A position is not filtered if its tokens require at most this acceptance probability, because the
# filter would drop hardly any token. The required probability depends on the threshold and on the
# earlier tokens only, so it is known before the token is drawn.
UNFILTERED_LIMIT = 0.12
# The required acceptance probability is clipped to at least this, and to at most one minus this.
MIN_REQUIRED = 1e-6


class Scorer(Protocol):
    """Computes P(accept) of every token at some positions, as log-odds."""

    def __call__(
        self,
        draft: Draft,
        companion_scores: CompanionScores | None,
        rows: Integers,
        places: Integers,
    ) -> Tensor:
        """``[n, vocab]`` log-odds at positions ``places`` of requests ``rows``, none greedy."""


def keep_likely(
    draft: Draft,
    companion_scores: CompanionScores | None,
    expected: Floats,
    score: Scorer,
    thresholds: Floats,
    greedy: NDArray[np.bool_],
) -> Plan:
    """Verify tokens while the probability that they are reached and accepted is high enough.

    The rule is applied to the whole vocabulary. Let w be the probability that all earlier tokens
    are accepted. Then keep(x) = [w·P(x) ≥ threshold] and q′ = q·keep. The first drafted token that
    is not kept ends the verified part. ``draft.probs`` is turned into the proposals in place, up to
    each request's last drafted token. Nothing reads the positions after the first dropped token.

    Args:
        draft: the draft, with signals.
        companion_scores: the companion's scores; ``None`` if it did not score the draft.
        expected: ``[batch, width or more]`` P of the drawn tokens.
        score: computes P of every token, as log-odds.
        thresholds: ``[batch]`` thresholds, known before the step; 0 verifies every drafted token.
        greedy: ``[batch]`` which requests are decoded at temperature 0.
    """
    if not any(draft.lengths):
        return Plan(draft.tokens, draft.lengths, draft.probs)
    required, filtered = _required(draft, expected, thresholds)
    # The proposal of a greedy request contains only the drawn token.
    is_kept = ~filtered | (expected[:, : required.shape[1]] >= required)
    rows, places = np.nonzero(filtered & ~greedy[:, None])
    if len(rows):
        scores = score(draft, companion_scores, rows, places)
        is_kept[rows, places] = _filter(draft, scores, rows, places, required[rows, places])
    _drop_greedy(draft, is_kept, greedy)
    return Plan(draft.tokens, _kept_lengths(draft, is_kept), draft.probs)


def _required(
    draft: Draft, expected: Floats, thresholds: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """The acceptance probability that tokens require, and which positions are filtered.

    Both are ``[batch, width]``.
    """
    num_requests, width = draft.tokens.shape
    before = np.ones((num_requests, width))
    np.cumprod(expected[:, : width - 1], axis=1, out=before[:, 1:])
    required: Floats = thresholds[:, None] / np.maximum(before, 1e-9)
    drafted = np.arange(width) < np.asarray(draft.lengths)[:, None]
    return required, drafted & (required > UNFILTERED_LIMIT)


def _drop_greedy(draft: Draft, is_kept: NDArray[np.bool_], greedy: NDArray[np.bool_]) -> None:
    """Set the proposals of greedy requests to 0 where their only token is dropped."""
    if draft.probs is None:
        return
    rows, places = np.nonzero(~is_kept & greedy[:, None])
    draft.probs[torch.from_numpy(rows), torch.from_numpy(places)] = 0.0


def _kept_lengths(draft: Draft, is_kept: NDArray[np.bool_]) -> tuple[int, ...]:
    """Number of leading tokens of each request that are all kept."""
    kept = np.minimum(np.cumprod(is_kept, axis=1).sum(axis=1), draft.lengths)
    return tuple(kept.tolist())


def _filter(
    draft: Draft, scores: Tensor, rows: Integers, places: Integers, required: Floats
) -> NDArray[np.bool_]:
    """Replace q by q·keep at ``n`` positions. Returns ``[n]``, whether each drawn token is kept."""
    device = draft.tokens.device
    row, place = (torch.from_numpy(index).to(device) for index in (rows, places))
    limits = np.clip(required, MIN_REQUIRED, 1 - MIN_REQUIRED)
    log_odds = torch.from_numpy(np.log(limits / (1 - limits)).astype(np.float32)).to(device)
    keep = scores >= log_odds.unsqueeze(1)
    if draft.probs is not None:
        draft.probs[row, place] *= keep
    drawn = draft.tokens[row, place].unsqueeze(1)
    is_kept: NDArray[np.bool_] = keep.gather(1, drawn).squeeze(1).cpu().numpy()
    return is_kept
