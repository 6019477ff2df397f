"""Children of tree nodes that are drawn from the draft's distribution without replacement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.trees import draw_children
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.distributions import row_probabilities
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.proposers.growing_tree import CopiedToken, GrowingTree
from draftwise.engine.proposers.tree_growth import Growth, Reading
from draftwise.models.transfer import fetch, upload

# Smallest probability of a drawn token, for the estimates.
_LEAST_PROB = 1e-30


class OpenDistributions(NamedTuple):
    """What the children of nodes of drawn trees are drawn from: q without a copied token.

    Attributes:
        probs: ``[drawn rows, own vocab]``; ``None`` without such nodes.
        rows: by row of the logits, the row of ``probs``.
        largest: ``[rows of the logits]`` largest probability; 0 for nodes of other trees.
        support: ``[rows of the logits]`` number of tokens that have a probability.
    """

    probs: Tensor | None
    rows: dict[int, int]
    largest: NDArray[np.float64]
    support: NDArray[np.int64]


class Drawing(NamedTuple):
    """Children of one node that are drawn.

    Attributes:
        tree: the tree.
        node: the node.
        row: row of the distribution that they are drawn from.
        values: estimated acceptance of each child.
        largest: largest probability of the distribution, without a copied token.
        entropy: entropy of the distribution.
    """

    tree: GrowingTree
    node: int
    row: int
    values: list[float]
    largest: float
    entropy: float


def open_distributions(
    model: CachedModel, step: DraftingStep, logits: Tensor, reading: Sequence[Reading]
) -> OpenDistributions:
    """The distributions that children of the nodes that were read are drawn from."""
    nodes = enumerate((tree, node) for tree, own in reading for node in own)
    drawn = [(row, tree, node) for row, (tree, node) in nodes if not tree.greedy]
    largest, support = np.zeros(len(logits)), np.zeros(len(logits), dtype=np.int64)
    if not drawn:
        return OpenDistributions(None, {}, largest, support)
    own_rows = [row for row, _, _ in drawn]
    rows = upload(own_rows, torch.long, logits.device)
    owners = upload([tree.index for _, tree, _ in drawn], torch.long, logits.device)
    q = row_probabilities(logits[rows], step.batch.controls, owners).nan_to_num(nan=0.0)
    q = _without_copied(model, q, [tree.copied_child(node) for _, tree, node in drawn])
    known = fetch(q.amax(dim=1), (q > 0).sum(dim=1))
    largest[own_rows], support[own_rows] = (each.numpy() for each in known)
    return OpenDistributions(q, {row: at for at, row in enumerate(own_rows)}, largest, support)


def add_drawn_children(growth: Growth, distributions: Tensor, drawing: Sequence[Drawing]) -> None:
    """Draw children without replacement, and add them to their trees.

    Args:
        growth: the trees.
        distributions: ``[rows, own vocab]``.
        drawing: the nodes that get children.
    """
    batch, device = growth.step.batch, distributions.device
    assert batch.uniforms is not None
    q = distributions[upload([each.row for each in drawing], torch.long, device)]
    width = max(len(each.values) for each in drawing)
    uniforms = torch.zeros(len(drawing), width, dtype=torch.float64)
    for at, each in enumerate(drawing):
        tree, count = each.tree, len(each.values)
        numbers = batch.uniforms.draft[tree.index, tree.num_drawn : tree.num_drawn + count]
        uniforms[at, :count] = numbers
        tree.num_drawn += count
    drawn = draw_children(q, uniforms.to(device))
    tokens = growth.model.target_tokens(drawn.clamp(min=0))
    added = []
    for each, own, there in zip(drawing, tokens.tolist(), (drawn >= 0).tolist(), strict=True):
        count = sum(there[: len(each.values)])
        # A drawn token has a probability, even where rounding left none beside a copied one.
        probs = [max(each.largest, _LEAST_PROB)] * count
        first = len(each.tree.nodes)
        each.tree.add(each.node, own[:count], probs, each.values[:count], each.entropy)
        added.append((each.tree, range(first, len(each.tree.nodes))))
    growth.keep_drawn(q, added)


def _without_copied(model: CachedModel, q: Tensor, copied: Sequence[CopiedToken | None]) -> Tensor:
    """Distributions without tokens that are children already; zeros where nothing is left.

    Args:
        model: the draft model.
        q: ``[rows, own vocab]``.
        copied: ``[rows]`` the token.
    """
    if not any(copied):
        return q
    tokens = upload([-1 if c is None else c.token for c in copied], torch.long, q.device)
    ids = model.target_tokens(torch.arange(q.shape[1], device=q.device))
    left = q.masked_fill(ids == tokens.unsqueeze(1), 0.0)
    total = left.sum(dim=1, keepdim=True)
    return left / torch.where(total > 0, total, 1.0)
