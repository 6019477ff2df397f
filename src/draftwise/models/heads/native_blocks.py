"""The forward pass of a head that drafts blocks, with the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from draftwise.kernels.native.block_head import NativeBlockHead
from draftwise.models.heads.block_forward import BlockOutput, block_tokens, limited
from draftwise.models.heads.block_layer import BlockPlan
from draftwise.models.heads.block_spec import BlockSpec


class NativeBlocks:
    """What :class:`draftwise.models.heads.block_forward.BlockForward` computes, by the kernels."""

    def __init__(
        self, spec: BlockSpec, native: NativeBlockHead, projection: Callable[[Tensor], Tensor]
    ) -> None:
        """Take over a packed head.

        Args:
            spec: the head.
            native: the head, packed for the kernels.
            projection: the target's projection of features to logits, used unless the head has its
                own.
        """
        self._spec, self._native, self._projection = spec, native, projection
        for index, view in enumerate(spec.views):
            native.view(index, view.is_causal, view.from_anchor and view.window is not None)

    def __call__(
        self, plan: BlockPlan, states: Tensor | None, anchors: Sequence[int], wanted: range
    ) -> BlockOutput | None:
        """Compute a pass; see :class:`draftwise.models.heads.block_forward.BlockForward`."""
        spec, native, cache = self._spec, self._native, plan.cache
        if states is not None:
            native.read_context(cache, states, plan.context)
        if not anchors:
            return None
        rows = [first + row for first in plan.first_rows for row in wanted]
        tokens = block_tokens(spec, anchors)
        hidden, logits = native.read_blocks(cache, tokens, plan.blocks, rows)
        if logits is None:
            logits = limited(spec, self._projection(hidden)).float()
        shape = len(anchors), len(wanted), -1
        return BlockOutput(hidden.view(shape), logits.view(shape))
