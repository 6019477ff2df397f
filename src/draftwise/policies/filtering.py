"""Filtered proposals: a rule about a token, applied to every token that might have been drawn."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.types import Draft, Judgement, Plan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Below this probability a filter would hardly drop anything: the token is verified as it is. What
# decides (the threshold and the tokens before) is known before the token is drawn.
_NOT_WORTH_FILTERING = 0.12


class Scorer(Protocol):
    """P(accept) of every token at some positions, as log-odds."""

    def __call__(
        self,
        draft: Draft,
        judgement: Judgement | None,
        rows: Integers,
        places: Integers,
        greedy: bool,
    ) -> Tensor:
        """``[n, vocab]`` for positions ``places`` of requests ``rows``, all greedy or none."""


def keep_likely(
    draft: Draft,
    judgement: Judgement | None,
    expected: Floats,
    score: Scorer,
    thresholds: Floats,
    greedy: NDArray[np.bool_],
) -> Plan:
    """Verify a token while it is likely enough to be reached and kept.

    The rule is applied to the whole vocabulary: with w the probability that all before are kept,
    keep(x) = [w·P(x) ≥ threshold], q′ = q·keep, and a drafted token that is not kept ends the
    verified part. ``draft.probs`` is turned into the proposals in place, up to each request's last
    drafted token: what lies behind the verified part is of no use to anybody.

    Args:
        draft: with signals.
        judgement: of the companion, if it was asked.
        expected: ``[batch, width]`` P of the drawn tokens.
        score: P of every token, as log-odds.
        thresholds: ``[batch]`` known before the step; 0 verifies whatever was drafted.
        greedy: ``[batch]`` which requests are decoded at temperature 0.
    """
    num_requests, width = draft.tokens.shape
    lengths = np.asarray(draft.lengths)
    if width == 0 or not num_requests:
        return Plan(draft.tokens, draft.lengths, draft.probs)
    before = np.ones((num_requests, width))
    np.cumprod(expected[:, : width - 1], axis=1, out=before[:, 1:])
    needed = thresholds[:, None] / np.maximum(before, 1e-9)
    drafted = np.arange(width) < lengths[:, None]
    filtered = drafted & (needed > _NOT_WORTH_FILTERING)
    stays = np.ones((num_requests, width), dtype=bool)
    for kind in (False, True):
        rows, places = np.nonzero(filtered & (greedy == kind)[:, None])
        if len(rows):
            scores = score(draft, judgement, rows, places, kind)
            stays[rows, places] = _filter(draft, scores, rows, places, needed[rows, places])
    kept = np.minimum(np.cumprod(stays, axis=1).sum(axis=1), lengths)
    return Plan(draft.tokens, tuple(kept.tolist()), draft.probs)


def _filter(
    draft: Draft, scores: Tensor, rows: Integers, places: Integers, needed: Floats
) -> NDArray[np.bool_]:
    """Turn q into q·keep at ``n`` positions; whether the drawn tokens stay."""
    device = draft.tokens.device
    row, place = (torch.from_numpy(index).to(device) for index in (rows, places))
    limits = np.clip(needed, 1e-6, 1 - 1e-6)
    log_odds = torch.from_numpy(np.log(limits / (1 - limits)).astype(np.float32)).to(device)
    keep = scores >= log_odds.unsqueeze(1)
    if draft.probs is not None:
        draft.probs[row, place] *= keep
    drawn = draft.tokens[row, place].unsqueeze(1)
    stays: NDArray[np.bool_] = keep.gather(1, drawn).squeeze(1).cpu().numpy()
    return stays
