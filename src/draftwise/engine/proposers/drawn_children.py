"""Children of tree nodes that are drawn from the draft's distribution without replacement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.core import trees
from draftwise.engine.proposers.growing_tree import GrowingTree
from draftwise.engine.proposers.tree_growth import Growth
from draftwise.models.native import trees as native
from draftwise.models.native.library import library_for
from draftwise.models.transfer import upload

# Smallest probability of a drawn token, for the estimates.
_LEAST_PROB = 1e-30


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


def add_drawn_children(growth: Growth, distributions: Tensor, drawing: Sequence[Drawing]) -> None:
    """Draw children without replacement, and add them to their trees.

    Args:
        growth: the trees.
        distributions: ``[rows, own vocab]``.
        drawing: the nodes that get children.
    """
    uniforms = growth.step.batch.uniforms
    assert uniforms is not None
    width = max(len(each.values) for each in drawing)
    numbers = torch.zeros(len(drawing), width, dtype=torch.float64)
    for at, each in enumerate(drawing):
        tree, count = each.tree, len(each.values)
        own = uniforms.draft[tree.index, tree.num_drawn : tree.num_drawn + count]
        numbers[at, :count] = own
        tree.num_drawn += count
    drawn = _draw(distributions, [each.row for each in drawing], numbers)
    tokens = growth.model.target_tokens(drawn.clamp(min=0))
    added = []
    for each, found, there in zip(drawing, tokens.tolist(), (drawn >= 0).tolist(), strict=True):
        count = sum(there[: len(each.values)])
        # A drawn token has a probability, even where rounding left none beside a copied one.
        probs = [max(each.largest, _LEAST_PROB)] * count
        first = len(each.tree.nodes)
        each.tree.add(each.node, found[:count], probs, each.values[:count], each.entropy)
        added.append((each.tree, range(first, len(each.tree.nodes)), each.row))
    growth.keep_drawn(distributions, added)


def _draw(distributions: Tensor, rows: Sequence[int], uniforms: Tensor) -> Tensor:
    """``[nodes, width]`` children; see :func:`draftwise.core.trees.draw_children`."""
    device = distributions.device
    library = library_for(device)
    if library is None:
        q = distributions[upload(rows, torch.long, device)]
        return trees.draw_children(q, uniforms.to(device))
    return native.draw_children(library, distributions, rows, uniforms)
