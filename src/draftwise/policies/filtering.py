"""Filtered proposals: a rule about a token, applied to every token that might have been drawn."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.types import Draft, Judgement, Plan

Floats = NDArray[np.float64]

# Below this probability a filter would hardly drop anything: the token is verified as it is. What
# decides (the threshold and the tokens before) is known before the token is drawn.
_NOT_WORTH_FILTERING = 0.12


class Scorer(Protocol):
    """P(accept) of every token at one position, as log-odds."""

    def __call__(
        self, draft: Draft, judgement: Judgement | None, rows: Tensor, place: int, greedy: bool
    ) -> Tensor:
        """``[rows, vocab]`` for some requests, all greedy or none."""


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
    verified part. ``draft.probs`` is turned into the proposals in place.

    Args:
        draft: with signals.
        judgement: of the companion, if it was asked.
        expected: ``[batch, num_tokens]`` P of the drawn tokens.
        score: P of every token, as log-odds.
        thresholds: ``[batch]`` known before the step; 0 verifies whatever was drafted.
        greedy: ``[batch]`` which requests are decoded at temperature 0.
    """
    lengths = list(draft.lengths)
    reach = np.ones(len(lengths))
    for place in range(draft.tokens.shape[1]):
        still = np.array([length > place for length in lengths])
        if not still.any():
            break
        needed = thresholds / np.maximum(reach, 1e-9)
        filtered = still & (needed > _NOT_WORTH_FILTERING)
        for kind in (False, True):
            rows = np.flatnonzero(filtered & (greedy == kind))
            if not len(rows):
                continue
            stays = _filter(draft, judgement, score, rows, place, needed[rows], kind)
            for row in rows[~stays]:
                lengths[row] = place
        reach[still] *= expected[still, place]
    return Plan(draft.tokens, tuple(lengths), draft.probs)


def _filter(
    draft: Draft,
    judgement: Judgement | None,
    score: Scorer,
    rows: NDArray[np.int64],
    place: int,
    needed: Floats,
    greedy: bool,
) -> NDArray[np.bool_]:
    """Turn q into q·keep at one position of some requests; whether the drawn tokens stay."""
    device = draft.tokens.device
    index = torch.from_numpy(rows).to(device)
    limits = np.clip(needed, 1e-6, 1 - 1e-6)
    log_odds = torch.tensor(np.log(limits / (1 - limits)), dtype=torch.float32, device=device)
    keep = score(draft, judgement, index, place, greedy) >= log_odds.unsqueeze(1)
    if draft.probs is not None:
        draft.probs[index, place] = draft.probs[index, place] * keep
    stays: NDArray[np.bool_] = keep.gather(1, draft.tokens[index, place].unsqueeze(1)).cpu().numpy()
    return stays[:, 0]
