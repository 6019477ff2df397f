"""The acceptance law of token trees, applied to the target's logits of a step.

The native kernels look only at the nodes that are reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core.rejection import sample
from draftwise.core.sampling import (
    TokenHistory,
    control_packed_logits,
    largest_scores,
    probabilities,
)
from draftwise.core.types import Draft, Outcome, Plan
from draftwise.engine.batch import Batch, token_history_along
from draftwise.engine.masks import next_masks
from draftwise.engine.tree_paths import accepted_nodes, path_rows
from draftwise.kernels.native import trees as native
from draftwise.kernels.native.library import library_for
from draftwise.models.memory import fetch, upload


class _Rows(NamedTuple):
    """The rows of logits of a batch of trees.

    Attributes:
        logits: ``[rows, vocab]``.
        owners: ``[rows]`` request of each row.
        depths: ``[rows]`` depth of each row's node; 0 for a root.
        token_history: ``[rows]`` the tokens before each row's next one; ``None`` if not needed.
        mask: ``[rows, vocab]`` the tokens that may come next; ``None`` for all.
    """

    logits: Tensor
    owners: list[int]
    depths: list[int]
    token_history: TokenHistory | None
    mask: Tensor | None


def accept_trees(batch: Batch, draft: Draft, plan: Plan, logits: Tensor) -> Outcome:
    """Decide which path each tree accepts.

    Args:
        batch: the step.
        draft: the draft.
        plan: the verified trees.
        logits: ``[rows, vocab]``; each request has a row for its root and one for each node.
    """
    rows = _rows(batch, plan, logits)
    library = library_for(logits.device)
    if library is not None:
        controlled = _controlled(batch, rows)
        nodes, next_tokens, is_nan = native.accept_trees(
            library, controlled, batch.controls, plan, batch.uniforms
        )
        failed = frozenset(index for index, bad in enumerate(is_nan) if bad)
    else:
        nodes, next_tokens, failed = _follow(batch, plan, rows)
    unknown = torch.zeros(len(nodes), max(plan.lengths, default=0))
    return Outcome(
        num_drafted=draft.lengths,
        num_verified=plan.lengths,
        num_accepted=tuple(len(own) for own in nodes),
        next_tokens=tuple(next_tokens),
        acceptance=unknown,
        prefix_acceptance_prob=unknown,
        failed=failed,
        num_known=(0,) * len(nodes),
        is_copied=draft.is_copied,
        copied=draft.copied,
        paths=tuple(tuple(own) for own in nodes),
    )


def _rows(batch: Batch, plan: Plan, logits: Tensor) -> _Rows:
    """The rows, with what is needed for penalties and masks."""
    device = logits.device
    owners, paths = path_rows(plan)
    depths = [len(path) for path in paths]
    token_history = mask = None
    if batch.token_history is not None:
        width = max(depths)
        padded = [token for path in paths for token in path + [0] * (width - len(path))]
        drafted = upload(padded, torch.long, device).view(len(paths), width)
        owner, depth = (upload(each, torch.long, device) for each in (owners, depths))
        token_history = token_history_along(batch.token_history, drafted, owner, depth)
    if batch.has_masks:
        places = zip((batch.generating[index] for index in owners), paths, strict=True)
        mask = next_masks(places, logits.shape[1], device)
    return _Rows(logits, owners, depths, token_history, mask)


def _controlled(batch: Batch, rows: _Rows) -> Tensor:
    """``[rows, vocab]`` the logits with bias, penalties and masks."""
    owner = upload(rows.owners, torch.long, rows.logits.device)
    return control_packed_logits(
        rows.logits, batch.controls, owner, rows.token_history, rows.mask, not batch.wants_logprobs
    )


def _follow(
    batch: Batch, plan: Plan, rows: _Rows
) -> tuple[list[list[int]], list[int], frozenset[int]]:
    """Accepted nodes, next tokens and failed requests, by PyTorch's operations."""
    is_nan, drawn = fetch(*_draw(batch, rows))
    nodes, next_tokens = accepted_nodes(plan, drawn.tolist())
    reached = _reached_rows(plan.lengths, nodes)
    failed = {rows.owners[row] for row in reached if is_nan[row]}
    return nodes, next_tokens, frozenset(failed)


def _reached_rows(lengths: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[int]:
    """The rows of the roots and of the accepted nodes."""
    reached, first = [], 0
    for length, own in zip(lengths, nodes, strict=True):
        reached += [first, *(first + 1 + node for node in own)]
        first += length + 1
    return reached


def _draw(batch: Batch, rows: _Rows) -> tuple[Tensor, Tensor]:
    """``[rows]`` whether a row of logits is NaN, and the token that is drawn there.

    A row is drawn like the next token of a request without a draft, with the random number of its
    position in the output. So a seed gives the same text with trees and without drafts.
    """
    uniforms = batch.uniforms
    if uniforms is None:
        tokens, is_nan = largest_scores(_controlled(batch, rows))
        return is_nan, tokens
    owner = torch.tensor(rows.owners)
    numbers = torch.cat([uniforms.final.unsqueeze(1), uniforms.following], dim=1)
    final = upload(numbers[owner, torch.tensor(rows.depths)], torch.float64, rows.logits.device)
    controls = batch.controls.rows(upload(owner, torch.long, rows.logits.device))
    p = probabilities(rows.logits, controls.masked(rows.mask), rows.token_history)
    return p[:, 0].isnan(), sample(p, final)
