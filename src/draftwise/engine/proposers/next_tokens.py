"""What a draft model proposes after the nodes of token trees that it has read.

These are its most likely tokens. The native kernels find them where there are some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.engine.cached_model import CachedModel
from draftwise.engine.drafting.loop import DraftingStep
from draftwise.kernels.native import trees as native
from draftwise.kernels.native.library import library_for
from draftwise.models.memory import fetch, upload


class NextTokens(NamedTuple):
    """What follows the nodes of a pass. A row is a node.

    Attributes:
        tokens: ``[rows, width]`` the most likely tokens, ids of the target.
        probs: ``[rows, width]`` the draft's probabilities of them, descending; 0 for no token.
        entropy: ``[rows]`` entropy of each distribution in nats; 0 if not wanted.
    """

    tokens: list[list[int]]
    probs: NDArray[np.float64]
    entropy: list[float]


def next_tokens(
    model: CachedModel,
    step: DraftingStep,
    logits: Tensor,
    owners: Sequence[int],
    width: int,
    wants_entropy: bool,
) -> NextTokens:
    """Find what follows the nodes that were read.

    Args:
        model: the draft model.
        step: the step.
        logits: ``[rows, own vocab]``.
        owners: ``[rows]`` index of each node's request.
        width: maximum number of children of a node.
        wants_entropy: whether the policy uses the entropy of the draft.
    """
    owner = upload(list(owners), torch.long, logits.device)
    width = min(width, logits.shape[1])
    library = library_for(logits.device)
    if library is None:
        found = _described(step, logits, owner, width, wants_entropy)
    else:
        found = native.describe_nodes(
            library, logits, step.batch.controls, owner, width, wants_entropy
        )
    entropy = torch.zeros(len(owners)) if found.entropy is None else found.entropy
    tokens, probs, entropy = fetch(model.target_tokens(found.tokens), found.probs, entropy)
    return NextTokens(tokens.tolist(), probs.double().numpy(), entropy.tolist())


def _described(
    step: DraftingStep, logits: Tensor, owner: Tensor, width: int, wants_entropy: bool
) -> native.DescribedNodes:
    """:func:`draftwise.kernels.native.trees.describe_nodes` by PyTorch's operations."""
    controls, scores = step.batch.controls, logits.float()
    temperature = controls.temperature[owner].unsqueeze(1)
    scores = scores / torch.where(temperature > 0, temperature, 1.0)
    top, tokens = scores.topk(width, dim=1)
    total = scores.logsumexp(dim=1, keepdim=True)
    entropy = None
    if wants_entropy:
        p = (scores - total).exp()
        entropy = torch.special.entr(p).sum(dim=1).nan_to_num(nan=0.0)
    probs = (top - total).exp().nan_to_num(nan=0.0)
    return native.DescribedNodes(tokens, probs, entropy)
