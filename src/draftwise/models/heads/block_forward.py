"""The forward pass of a head that drafts blocks, in PyTorch operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.blocked_linear import join_linear
from draftwise.models.heads.block_layer import BlockLayer, BlockPlan
from draftwise.models.heads.block_spec import BlockSpec
from draftwise.models.norm import Norm


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
        self, plan: BlockPlan, states: Tensor | None, anchors: Tensor | None
    ) -> Tensor | None:
        """Compute a pass, and write its keys and values.

        Args:
            plan: the rows of the pass.
            states: ``[context, state_size]`` the target's states; ``None`` without new context.
            anchors: ``[blocks]`` int64, the newest token of each request that drafts; ``None``
                without blocks.

        Returns:
            ``[blocks, block_size, hidden]`` after the final norm; ``None`` without blocks.
        """
        spec = self._spec
        context = None if states is None else self._context_norm(self._fusion(states))
        hidden = None if anchors is None else self._embedded(anchors)
        cos, sin = spec.rotary(plan.positions)
        dtype = spec.embedding.dtype
        angles = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
        for layer in self._layers:
            hidden = layer.read(plan, context, hidden, angles)
        if hidden is None:
            return None
        return self._norm(hidden).view(-1, spec.block_size, spec.hidden_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[rows, draft_vocab]`` of rows ``[rows, hidden]`` after the final norm."""
        logits, softcap = self._projection(hidden), self._spec.logit_softcap
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _embedded(self, anchors: Tensor) -> Tensor:
        """``[blocks * block_size, hidden]`` the embedded rows of the blocks."""
        spec = self._spec
        ids = anchors.new_full((len(anchors), spec.block_size), spec.mask_token_id)
        ids[:, 0] = anchors
        return F.embedding(ids.flatten(), spec.embedding) * spec.embedding_scale
