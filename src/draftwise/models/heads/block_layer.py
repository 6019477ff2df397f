"""One layer of a head that drafts blocks, in PyTorch operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from draftwise.models.blocked_linear import join_linear
from draftwise.models.decoder_layer import DecoderLayer, rotate
from draftwise.models.heads.block_conv import BlockConvolution
from draftwise.models.heads.block_spec import BlockSpec, BlockView
from draftwise.models.kv_cache import KVCache
from draftwise.models.segment import Segment


@dataclass(frozen=True)
class BlockPlan:
    """The rows of one pass: new tokens of contexts, and then blocks.

    Attributes:
        cache: the head's cache.
        context: new tokens of each request.
        blocks: the block of each request that drafts. It begins where the context ends.
    """

    cache: KVCache
    context: Sequence[Segment]
    blocks: Sequence[Segment]
    _hidden: dict[tuple[BlockView, int], Tensor] = field(default_factory=dict)

    @cached_property
    def positions(self) -> Tensor:
        """``[context + block rows]`` int64, positions in the texts."""
        parts = [torch.arange(s.start, s.start + s.num_tokens) for s in self._segments]
        return torch.cat(parts).to(self.cache.device)

    @cached_property
    def token_slots(self) -> Tensor:
        """``[context + block rows]`` int64, cache_slot * capacity + position."""
        capacity = self.cache.capacity
        slots = torch.tensor([s.cache_slot for s in self._segments])
        counts = torch.tensor([s.num_tokens for s in self._segments])
        bases = (slots * capacity).repeat_interleave(counts)
        return bases.to(self.cache.device) + self.positions

    @property
    def num_context(self) -> int:
        """Rows of the contexts."""
        return sum(segment.num_tokens for segment in self.context)

    @property
    def first_rows(self) -> list[int]:
        """``[blocks]`` index of the first row of each block among the rows of all blocks."""
        counts = [segment.num_tokens for segment in self.blocks]
        return list(accumulate(counts, initial=0))[:-1]

    def hidden(self, view: BlockView, anchor: int) -> Tensor:
        """``[block_size, keys]`` whether rows do not attend to keys; see :class:`BlockView`.

        Layers with the same view share it.
        """
        known = self._hidden.get((view, anchor))
        if known is None:
            known = view.hidden(anchor, self.blocks[0].num_tokens, self.cache.device)
            self._hidden[view, anchor] = known
        return known

    @property
    def _segments(self) -> list[Segment]:
        return [*self.context, *self.blocks]


class BlockLayer(DecoderLayer):
    """A layer whose keys and values are those of the context and of the block.

    Both are computed by the same matrices: of the context from its rows as they are, of the block
    from the normalised residual stream. Only the block has queries. ``qkv`` computes queries alone.
    """

    def __init__(self, spec: BlockSpec, index: int, dtype: torch.dtype) -> None:
        """Take over a layer. Its own linear layers lose their weights."""
        layer = spec.layers[index]
        query, *key_value = layer.qkv
        super().__init__(spec, replace(layer, qkv=(query,)), dtype)
        self._key_value = join_linear(key_value)
        self._block, self._index, self._view = spec, index, spec.views[index]
        self._attention_conv = self._mlp_conv = None
        if spec.convolutions:
            size, (attention, mlp) = spec.block_size, spec.convolutions[index]
            self._attention_conv = BlockConvolution(attention, size)
            self._mlp_conv = BlockConvolution(mlp, size)

    def read(
        self,
        plan: BlockPlan,
        context: Tensor | None,
        hidden: Tensor | None,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor | None:
        """Store the keys and values of a pass, and compute the blocks.

        Args:
            plan: the rows of the pass.
            context: ``[context, hidden]`` rows of the context; ``None`` without any.
            hidden: ``[block rows, hidden]`` residual stream of the blocks; ``None`` without any.
            angles: cosines and sines ``[context + block rows, 1, head / 2]``.

        Returns:
            The residual stream of the blocks after the layer; ``None`` without any.
        """
        spec, normed, deviations = self._block, hidden, None
        if hidden is not None and self.attention_norm is not None:
            normed = self.attention_norm(hidden)
        if normed is not None and self._attention_conv is not None:
            normed, deviations = self._attention_conv.enter(normed)
        both = torch.cat([rows for rows in (context, normed) if rows is not None])
        heads = self._key_value(both).view(len(both), -1, spec.head_size)
        keys, values = heads[:, : spec.num_kv_heads], heads[:, spec.num_kv_heads :]
        if self.k_norm is not None:
            keys = self.k_norm.of_heads(keys)
        cache, index = plan.cache, self._index
        slots = cache.in_layer(index, plan.token_slots, plan.positions)
        cache.write(index, slots, rotate(keys, *angles), values)
        if hidden is None or normed is None:
            return None
        queries = self.qkv(normed).view(len(normed), -1, spec.head_size)
        if self.q_norm is not None:
            queries = self.q_norm.of_heads(queries)
        queries = rotate(queries, *(each[plan.num_context :] for each in angles))
        out = self.out(self._attend(plan, queries))
        if self._attention_conv is not None and deviations is not None:
            out = self._attention_conv.leave(out, deviations)
        return self.feed_forward(hidden + out)

    def mlp(self, normed: Tensor) -> Tensor:
        """See :meth:`DecoderLayer.mlp`."""
        if self._mlp_conv is None:
            return super().mlp(normed)
        rows, deviations = self._mlp_conv.enter(normed)
        return self._mlp_conv.leave(super().mlp(rows), deviations)

    def _attend(self, plan: BlockPlan, queries: Tensor) -> Tensor:
        """``[block rows, heads * head]`` of ``[block rows, heads, head]``."""
        out = torch.empty_like(queries)
        for (slot, anchor, size), row in zip(plan.blocks, plan.first_rows, strict=True):
            first = self._view.first(anchor)
            keys, values = plan.cache.read_span(self._index, slot, first, anchor + size)
            own = queries[row : row + size]
            grouped = own.view(size, len(keys), -1, own.shape[2]).permute(1, 2, 0, 3)
            hidden = plan.hidden(self._view, anchor)
            attended = self.scores.attend(grouped, keys, values, hidden)
            out[row : row + size] = attended.permute(2, 0, 1, 3).reshape(own.shape)
        return out.flatten(1)
