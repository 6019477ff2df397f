"""What a draft model proposes after the nodes of token trees that it has read.

For a greedy request these are its most likely tokens. For another one it is the distribution that
the children of a node are drawn from. The native kernels compute both where there are some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.sampling import probabilities
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.engine.proposers.growing_tree import CopiedToken
from draftwise.engine.proposers.tree_growth import Reading
from draftwise.models.native import trees as native
from draftwise.models.native.library import library_for
from draftwise.models.transfer import fetch, upload


class NextTokens(NamedTuple):
    """What follows the nodes of a pass. A row is a node.

    Attributes:
        tokens: ``[rows, width]`` the most likely tokens, ids of the target; for greedy requests.
        probs: ``[rows, width]`` the draft's probabilities of them, descending; 0 for no token.
        entropy: ``[rows]`` entropy of each distribution in nats; 0 if not wanted.
        open_probs: ``[drawn rows, own vocab]`` what the children of other requests' nodes are drawn
            from: q without a copied token.
        open_rows: by row, the row of ``open_probs``; -1 for greedy requests.
        largest: ``[rows]`` largest probability of ``open_probs``; 0 for greedy requests.
        support: ``[rows]`` number of tokens that have a probability there.
    """

    tokens: list[list[int]]
    probs: NDArray[np.float64]
    entropy: list[float]
    open_probs: Tensor
    open_rows: list[int]
    largest: NDArray[np.float64]
    support: NDArray[np.int64]


def next_tokens(
    model: CachedModel,
    step: DraftingStep,
    logits: Tensor,
    reading: Sequence[Reading],
    width: int,
    wants_entropy: bool,
) -> NextTokens:
    """Find what follows the nodes that were read.

    Args:
        model: the draft model.
        step: the step.
        logits: ``[rows, own vocab]``.
        reading: the nodes, in the order of the rows.
        width: maximum number of children of a node.
        wants_entropy: whether the policy uses the entropy of the draft.
    """
    nodes = [(tree, node) for tree, own in reading for node in own]
    drawn = [row for row, (tree, _) in enumerate(nodes) if not tree.greedy]
    open_rows = [-1] * len(nodes)
    for place, row in enumerate(drawn):
        open_rows[row] = place
    owner = upload([tree.index for tree, _ in nodes], torch.long, logits.device)
    width = min(width, logits.shape[1])
    library = library_for(logits.device)
    if library is None:
        found = _described(step, logits, owner, drawn, width, wants_entropy)
    else:
        found = native.describe_nodes(
            library, logits, step.batch.controls, owner, open_rows, width, wants_entropy
        )
    copied = [nodes[row][0].copied_child(nodes[row][1]) for row in drawn]
    if any(copied):
        found = _without_copied(model, found, drawn, copied)
    entropy = torch.zeros(len(nodes)) if found.entropy is None else found.entropy
    tokens, probs, entropy, largest, support = fetch(
        model.target_tokens(found.tokens), found.probs, entropy, found.largest, found.support
    )
    return NextTokens(
        tokens.tolist(),
        probs.double().numpy(),
        entropy.tolist(),
        found.q,
        open_rows,
        largest.double().numpy(),
        support.numpy(),
    )


def _described(
    step: DraftingStep,
    logits: Tensor,
    owner: Tensor,
    drawn: list[int],
    width: int,
    wants_entropy: bool,
) -> native.DescribedNodes:
    """:func:`draftwise.models.native.trees.describe_nodes` by PyTorch's operations."""
    controls, scores = step.batch.controls, logits.float()
    temperature = controls.temperature[owner].unsqueeze(1)
    scores = scores / torch.where(temperature > 0, temperature, 1.0)
    top, tokens = scores.topk(width, dim=1)
    total = scores.logsumexp(dim=1, keepdim=True)
    entropy = None
    if wants_entropy:
        p = (scores - total).exp()
        entropy = torch.special.entr(p).sum(dim=1).nan_to_num(nan=0.0)
    largest = scores.new_zeros(len(scores))
    support = tokens.new_zeros(len(scores))
    q = scores[:0]
    if drawn:
        rows = upload(drawn, torch.long, logits.device)
        q = probabilities(logits[rows], controls.rows(owner[rows])).nan_to_num(nan=0.0)
        largest[rows], support[rows] = q.amax(dim=1), (q > 0).sum(dim=1)
    probs = (top - total).exp().nan_to_num(nan=0.0)
    return native.DescribedNodes(tokens, probs, entropy, q, largest, support)


def _without_copied(
    model: CachedModel,
    found: native.DescribedNodes,
    drawn: list[int],
    copied: Sequence[CopiedToken | None],
) -> native.DescribedNodes:
    """Distributions without tokens that are children already; zeros where nothing is left.

    Args:
        model: the draft model.
        found: the distributions.
        drawn: ``[drawn rows]`` their rows among all.
        copied: ``[drawn rows]`` the token.
    """
    q = found.q
    tokens = upload([-1 if c is None else c.token for c in copied], torch.long, q.device)
    ids = model.target_tokens(torch.arange(q.shape[1], device=q.device))
    left = q.masked_fill(ids == tokens.unsqueeze(1), 0.0)
    total = left.sum(dim=1, keepdim=True)
    left = left / torch.where(total > 0, total, 1.0)
    rows = upload(drawn, torch.long, q.device)
    largest, support = found.largest.clone(), found.support.clone()
    largest[rows], support[rows] = left.amax(dim=1), (left > 0).sum(dim=1)
    return found._replace(q=left, largest=largest, support=support)
