"""Filtered proposals: a rule about a token, applied to every token that might have been drawn."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.types import CompanionScores, Draft, Plan, RuleNotes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Below this probability a filter would hardly drop anything: the token is verified as it is. What
# decides (the threshold and the tokens before) is known before the token is drawn.
NEXT_TO_NOTHING = 0.12
# A token needs at least this probability, and at most certainty less as much.
LEAST_NEEDED = 1e-6


class Scorer(Protocol):
    """P(accept) of every token at some positions, as log-odds."""

    def __call__(
        self,
        draft: Draft,
        companion_scores: CompanionScores | None,
        rows: Integers,
        places: Integers,
    ) -> Tensor:
        """``[n, vocab]`` for positions ``places`` of requests ``rows``, none of them greedy."""


class RangeFinder(Protocol):
    """Which q(x) make a token likely enough."""

    def __call__(self, needed: Floats, greedy: bool) -> tuple[Floats, Floats]:
        """``[batch, width]`` least and largest q(x) where a token needs so much, above 0 and below
        1, in requests that are all greedy or all are not.
        """


def keep_likely(
    draft: Draft,
    companion_scores: CompanionScores | None,
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
        companion_scores: of the companion, if it was asked.
        expected: ``[batch, width or more]`` P of the drawn tokens.
        score: P of every token, as log-odds.
        thresholds: ``[batch]`` known before the step; 0 verifies whatever was drafted.
        greedy: ``[batch]`` which requests are decoded at temperature 0.
    """
    if not any(draft.lengths):
        return Plan(draft.tokens, draft.lengths, draft.probs)
    needed, filtered = _needed(draft, expected, thresholds)
    # Of a greedy request the drawn token is all there is.
    stays = ~filtered | (expected[:, : needed.shape[1]] >= needed)
    rows, places = np.nonzero(filtered & ~greedy[:, None])
    if len(rows):
        scores = score(draft, companion_scores, rows, places)
        stays[rows, places] = _filter(draft, scores, rows, places, needed[rows, places])
    _drop_greedy(draft, stays, greedy)
    return Plan(draft.tokens, _kept(draft, stays), draft.probs)


def keep_in_range(
    draft: Draft,
    expected: Floats,
    find: RangeFinder,
    thresholds: Floats,
    greedy: NDArray[np.bool_],
) -> Plan:
    """:func:`keep_likely` where P(x) is a function of q(x): what is kept lies between two values.

    Nothing is computed for the vocabulary here: the acceptance law compares q(x) with the two when
    it reads it.

    Args:
        draft: with signals.
        expected: ``[batch, width]`` P of the drawn tokens.
        find: which q(x) are likely enough.
        thresholds: ``[batch]`` known before the step; 0 verifies whatever was drafted.
        greedy: ``[batch]`` which requests are decoded at temperature 0.
    """
    assert draft.signals is not None
    if not any(draft.lengths):
        return Plan(draft.tokens, draft.lengths, draft.probs)
    needed, filtered = _needed(draft, expected, thresholds)
    limits = np.minimum(np.maximum(needed, LEAST_NEEDED), 1 - LEAST_NEEDED)
    any_greedy = bool(greedy.any())
    least, most = find(limits, any_greedy)
    if any_greedy and not greedy.all():
        is_greedy, sampled = greedy[:, None], find(limits, False)
        least, most = np.where(is_greedy, least, sampled[0]), np.where(is_greedy, most, sampled[1])
    least = np.where(filtered, least, 0.0).astype(np.float32)
    most = np.where(filtered, most, np.inf).astype(np.float32)
    drawn = draft.signals.token_probs
    if draft.probs is not None:  # the very numbers that will be compared
        q = draft.probs[:, :-1].gather(2, draft.tokens.unsqueeze(2)).squeeze(2)
        drawn = torch.where(torch.from_numpy(greedy).to(q.device)[:, None], drawn, q)
    believed = drawn.cpu().numpy()
    stays = (believed >= least) & (believed <= most)
    lengths = _kept(draft, stays)
    if draft.probs is None:
        return Plan(draft.tokens, lengths, None)
    if any_greedy:
        _drop_greedy(draft, stays, greedy)
        least[greedy], most[greedy] = 0.0, np.inf
    device = draft.tokens.device
    between = torch.from_numpy(least).to(device), torch.from_numpy(most).to(device)
    return Plan(draft.tokens, lengths, draft.probs, between=between)


def keep_noted(draft: Draft, notes: RuleNotes, greedy: NDArray[np.bool_]) -> Plan:
    """:func:`keep_in_range` as it was noted while drafting.

    Args:
        draft: written by a rule.
        notes: of the rule, for all who drafted.
        greedy: ``[batch]`` which requests are decoded at temperature 0.
    """
    width, lengths = draft.tokens.shape[1], np.asarray(draft.lengths)
    kept = np.clip(notes.kept, 0, lengths)
    if draft.probs is None:
        return Plan(draft.tokens, tuple(kept.tolist()), None)
    for request in np.flatnonzero(greedy & (kept < lengths)).tolist():
        draft.probs[request, kept[request]] = 0.0  # its only token is dropped
    device = draft.tokens.device
    between = tuple(
        torch.from_numpy(np.ascontiguousarray(bound[:, :width])).to(device)
        for bound in (notes.least, notes.most)
    )
    return Plan(draft.tokens, tuple(kept.tolist()), draft.probs, between=(between[0], between[1]))


def _needed(draft: Draft, expected: Floats, thresholds: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """``[batch, width]`` the P that a token needs, and where that is more than next to nothing."""
    num_requests, width = draft.tokens.shape
    before = np.ones((num_requests, width))
    np.cumprod(expected[:, : width - 1], axis=1, out=before[:, 1:])
    needed: Floats = thresholds[:, None] / np.maximum(before, 1e-9)
    drafted = np.arange(width) < np.asarray(draft.lengths)[:, None]
    return needed, drafted & (needed > NEXT_TO_NOTHING)


def _drop_greedy(draft: Draft, stays: NDArray[np.bool_], greedy: NDArray[np.bool_]) -> None:
    """Where the only token of a greedy request is dropped nothing is proposed."""
    if draft.probs is None:
        return
    rows, places = np.nonzero(~stays & greedy[:, None])
    draft.probs[torch.from_numpy(rows), torch.from_numpy(places)] = 0.0


def _kept(draft: Draft, stays: NDArray[np.bool_]) -> tuple[int, ...]:
    """Leading tokens of each request that all stay."""
    kept = np.minimum(np.cumprod(stays, axis=1).sum(axis=1), draft.lengths)
    return tuple(kept.tolist())


def _filter(
    draft: Draft, scores: Tensor, rows: Integers, places: Integers, needed: Floats
) -> NDArray[np.bool_]:
    """Turn q into q·keep at ``n`` positions; whether the drawn tokens stay."""
    device = draft.tokens.device
    row, place = (torch.from_numpy(index).to(device) for index in (rows, places))
    limits = np.clip(needed, LEAST_NEEDED, 1 - LEAST_NEEDED)
    log_odds = torch.from_numpy(np.log(limits / (1 - limits)).astype(np.float32)).to(device)
    keep = scores >= log_odds.unsqueeze(1)
    if draft.probs is not None:
        draft.probs[row, place] *= keep
    drawn = draft.tokens[row, place].unsqueeze(1)
    stays: NDArray[np.bool_] = keep.gather(1, drawn).squeeze(1).cpu().numpy()
    return stays
