"""The forward pass of a head that drafts blocks, in PyTorch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.blocked_linear import join_linear
from draftwise.models.heads.block_layer import BlockLayer, BlockPlan
from draftwise.models.heads.block_spec import BlockSpec
from draftwise.models.memory import upload
from draftwise.models.norm import Norm


class BlockOutput(NamedTuple):
    """What a pass computes of blocks.

    Attributes:
        hidden: ``[blocks, positions, hidden]`` the output of the layers after the final norm.
        logits: ``[blocks, positions, draft_vocab]`` without the correction.
    """

    hidden: Tensor
    logits: Tensor


class BlockForward:
    """A head of DFlash or DSpark without its Markov head.

    A row of the context is the projection of the target's states at a position. It has keys and
    values in every layer, and no queries. A block consists of the newest token, of which the target
    has no state yet, and of mask tokens. Its rows attend to the context and to each other.
    """

    def __init__(self, spec: BlockSpec, projection: Callable[[Tensor], Tensor]) -> None:
        """Take over a head. Its linear layers lose their weights.

        Args:
            spec: the head.
            projection: the target's projection of features to logits, used unless the head has its
                own.
        """
        self._spec, dtype = spec, spec.embedding.dtype
        self._fusion = join_linear([spec.fusion])
        self._context_norm = Norm(spec.context_norm, dtype)
        self._layers = [BlockLayer(spec, index, dtype) for index in range(len(spec.layers))]
        self._norm = Norm(spec.norm, dtype)
        self._projection = projection if spec.head is None else join_linear([spec.head])

    def __call__(
        self, plan: BlockPlan, states: Tensor | None, anchors: Sequence[int], wanted: range
    ) -> BlockOutput | None:
        """Compute a pass, and write its keys and values.

        Args:
            plan: the rows of the pass.
            states: ``[context, state_size]`` the target's states; ``None`` without new context.
            anchors: ``[blocks]`` the newest token of each request that drafts.
            wanted: rows of each block whose results are returned.

        Returns:
            ``None`` without blocks.
        """
        spec = self._spec
        context = None if states is None else self._context_norm(self._fusion(states))
        hidden = self._embedded(anchors) if anchors else None
        cos, sin = spec.rotary(plan.positions)
        dtype = spec.embedding.dtype
        angles = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
        for layer in self._layers:
            hidden = layer.read(plan, context, hidden, angles)
        if hidden is None:
            return None
        normed = self._norm(hidden).view(-1, spec.block_size, spec.hidden_size)
        chosen = normed[:, wanted.start : wanted.stop]
        # For all positions at once, so that the projection is read once.
        logits = limited(spec, self._projection(chosen.flatten(0, 1)))
        return BlockOutput(chosen, logits.view(*chosen.shape[:2], -1))

    def _embedded(self, anchors: Sequence[int]) -> Tensor:
        """``[blocks * block_size, hidden]`` the embedded rows of the blocks."""
        spec = self._spec
        ids = upload(block_tokens(spec, anchors), torch.long, spec.embedding.device)
        return F.embedding(ids, spec.embedding) * spec.embedding_scale


def block_tokens(spec: BlockSpec, anchors: Sequence[int]) -> list[int]:
    """``[blocks * block_size]`` the tokens of the rows of blocks: the newest, and mask tokens."""
    masks = [spec.mask_token_id] * (spec.block_size - 1)
    return [token for anchor in anchors for token in (anchor, *masks)]


def limited(spec: BlockSpec, logits: Tensor) -> Tensor:
    """Projected rows with the head's factor and limit of the logits."""
    softcap = spec.logit_softcap
    if spec.logit_scale != 1:
        logits = logits * spec.logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
