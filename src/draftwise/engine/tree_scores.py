"""The companion's scores of the nodes of token trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core.sampling import LogitControls, soft_probabilities
from draftwise.core.signals import agreement, overlap
from draftwise.core.trees import ROOT
from draftwise.core.types import CompanionScores, Draft, TreeSignals
from draftwise.models.transfer import upload


class ScoredTree(NamedTuple):
    """A token tree whose nodes a companion scores.

    Attributes:
        request: index of the request.
        num_rows: number of its rows of the companion's logits: the root's and those of the nodes
            that have children.
        rows: ``[nodes]`` the row of each node's parent.
    """

    request: int
    num_rows: int
    rows: list[int]


def inner_nodes(parents: Sequence[int], rows: Sequence[int]) -> list[int] | None:
    """The nodes that a companion must read to score a tree; ``None`` if it cannot score any.

    Args:
        parents: ``[nodes]`` parents of the drafted nodes, -1 for the root.
        rows: ``[nodes]`` -1 for a node without a distribution of the draft.
    """
    scored = [node for node, row in zip(range(len(parents)), rows, strict=False) if row >= 0]
    if not scored:
        return None
    needed: set[int] = set()
    for node in scored:
        parent = parents[node]
        while parent != ROOT and parent not in needed:
            needed.add(parent)
            parent = parents[parent]
    return sorted(needed)


def tree_scores(
    logits: Tensor,
    controls: LogitControls,
    scored: Sequence[ScoredTree],
    draft: Draft,
    signals: TreeSignals,
) -> CompanionScores:
    """The companion's scores of the nodes of token trees.

    Args:
        logits: ``[sum of num_rows, vocab]`` logits of the companion.
        controls: one entry per request.
        scored: the trees that have logits.
        draft: the draft.
        signals: its signals.
    """
    device = logits.device
    owner = upload([t.request for t in scored for _ in range(t.num_rows)], torch.long, device)
    c = soft_probabilities(logits, controls.rows(owner)).nan_to_num(nan=0.0)
    nodes = [
        (tree.request, node, signals.probs.rows[tree.request][node], row)
        for tree in scored
        for node, row in enumerate(tree.rows)
        if signals.probs.rows[tree.request][node] >= 0
    ]
    # Siblings share the distributions of their parent.
    pairs = {(own, row): at for at, (own, row) in enumerate(dict.fromkeys(n[2:] for n in nodes))}
    own_rows, rows = _columns(list(pairs), device)
    q, c = signals.probs.over_vocabulary(own_rows), c[rows]
    request, node, pair = _columns([(*n[:2], pairs[n[2:]]) for n in nodes], device)
    tokens = draft.tokens[request, node]
    scores = torch.full((2, *draft.tokens.shape), torch.nan, device=device)
    scores[0, request, node] = overlap(q, c)[pair]
    scores[1, request, node] = agreement(q[pair, tokens], c[pair, tokens])
    no_probs = c.new_zeros(*draft.tokens.shape, 0)
    return CompanionScores(no_probs, scores[0], scores[1], len(logits))


def _columns(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """The columns of a table of integers."""
    numbers = upload([number for row in rows for number in row], torch.long, device)
    return numbers.view(len(rows), -1).unbind(dim=1)
