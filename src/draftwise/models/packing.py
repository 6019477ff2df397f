"""Packing: the new tokens of many requests as one sequence without padding.

The linear layers of a model compute the packed tokens at once. In attention, each token attends to
its own request's cache slot. On a CPU, a native kernel computes all requests with few new tokens.
Otherwise, requests in neighbouring cache slots with a similar amount of work form a group, which is
padded and computed in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.kernels.native.attention import NativeAttention, native_attention
from draftwise.models.kv_cache import KVCache
from draftwise.models.ragged import RaggedAttention
from draftwise.models.recurrent.computation import RecurrentPass
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import SegmentTree, tree_tokens

# A segment with more queries than this (a chunk of a prompt) is computed on its own.
_LARGEST_GROUPED_QUERY = 32
# Largest ratio of a group's key positions with padding to those without.
_LARGEST_PADDING = 2


class PackedSegment(NamedTuple):
    """A segment and the index of its first packed token."""

    segment: Segment
    first_token: int


@dataclass
class AttentionGroup:
    """Segments in neighbouring cache slots, computed in one call.

    Attributes:
        first_cache_slot: first cache slot.
        end_cache_slot: one past the last cache slot.
        num_queries: the longest segment's length.
        kv_length: keys read from each cache slot.
        mask: additive mask ``[cache_slots, 1, num_queries, kv_length]``, or ``None`` where every
            query attends to every key.
        first_token: index of the group's first packed token.
        num_tokens: packed tokens of the group.
        padded: ``[cache_slots * num_queries]`` index into the group's tokens, or ``None`` where
            all segments have the same length.
        real: ``[num_tokens]`` index of each token among the padded queries, or ``None`` where
            ``padded`` is.
    """

    first_cache_slot: int
    end_cache_slot: int
    num_queries: int
    kv_length: int
    mask: Tensor | None
    first_token: int
    num_tokens: int
    padded: Tensor | None
    real: Tensor | None
    _folded: dict[int, Tensor] = field(default_factory=dict)

    def folded_mask(self, num_heads_per_kv: int) -> Tensor | None:
        """The mask with grouped query heads folded into the query dimension, built once."""
        if self.mask is None:
            return None
        if num_heads_per_kv not in self._folded:
            self._folded[num_heads_per_kv] = self.mask.repeat(1, 1, num_heads_per_kv, 1)
        return self._folded[num_heads_per_kv]


@dataclass(frozen=True)
class PackedBatch:
    """The plan of one forward pass, which all layers share.

    Attributes:
        cache: the model's cache.
        positions: ``[tokens]`` int64 position of each token in its request.
        token_slots: ``[tokens]`` int64, cache_slot * capacity + position of each token: where it is
            written to in layers without a ring.
        groups: attention calls of the segments that ``native`` does not compute, in layers in which
            each token attends to all tokens before it.
        segments: the segments that ``native`` does not compute.
        tree_segments: those of ``segments`` that are part of a token tree. They are in no group.
        tree: ``[tokens]`` of ``TREE_TOKEN``; ``None`` if no segment is part of a token tree.
        ragged: attention of all segments in one call, where the device has a kernel for it.
        native: attention of segments with few tokens by the CPU kernel, where it is available.
        recurrent: computes the layers with a recurrence; ``None`` without such layers.
    """

    cache: KVCache
    positions: Tensor
    token_slots: Tensor
    groups: list[AttentionGroup]
    ragged: RaggedAttention | None = None
    native: NativeAttention | None = None
    segments: Sequence[PackedSegment] = ()
    tree_segments: Sequence[PackedSegment] = ()
    tree: NDArray[np.void] | None = None
    recurrent: RecurrentPass | None = None
    _slots: dict[int, Tensor] = field(default_factory=dict)

    def slots(self, layer: int) -> Tensor:
        """``[tokens]`` int64, token slot that each token is written to in a layer."""
        size = self.cache.sizes[layer]
        if size not in self._slots:
            places = self.token_slots % self.cache.capacity
            self._slots[size] = self.cache.in_layer(layer, self.token_slots, places)
        return self._slots[size]


def pack(
    cache: KVCache,
    segments: Sequence[Segment],
    dtype: torch.dtype,
    device: torch.device,
    trees: Sequence[SegmentTree | None] | None = None,
) -> PackedBatch:
    """Plan one forward pass.

    Args:
        cache: the model's cache.
        segments: new tokens of each request, ordered by cache slot. The packed tokens are in this
            order.
        dtype: dtype of the model, for the additive masks.
        device: device of the index tensors.
        trees: ``[segments]`` the token tree that each segment is part of; ``None`` for segments of
            consecutive tokens.
    """
    tree = None if trees is None else tree_tokens(segments, trees)
    positions: list[int] = [] if tree is None else tree["position"].tolist()
    token_slots: list[int] = []
    for cache_slot, start, count in segments:
        if tree is None:
            positions.extend(range(start, start + count))
        base = cache_slot * cache.capacity + start
        token_slots.extend(range(base, base + count))
    native = native_attention(cache, segments, _LARGEST_GROUPED_QUERY, dtype, device, tree)
    groups: list[AttentionGroup] = []
    others: list[PackedSegment] = []
    of_trees: list[PackedSegment] = []
    first_token = 0
    is_tree = [False] * len(segments) if trees is None else [each is not None for each in trees]
    for members in _group(segments, is_tree):
        if native is None or members[0].num_tokens > _LARGEST_GROUPED_QUERY:
            ends = accumulate((each.num_tokens for each in members), initial=first_token)
            packed = [PackedSegment(*each) for each in zip(members, ends, strict=False)]
            others += packed
            if tree is not None and tree["ancestors"][first_token]:
                of_trees += packed
            else:
                groups.append(_attention_group(members, first_token, dtype, device))
        first_token += sum(segment.num_tokens for segment in members)
    return PackedBatch(
        cache,
        torch.tensor(positions, dtype=torch.long, device=device),
        torch.tensor(token_slots, dtype=torch.long, device=device),
        groups,
        native=native,
        segments=others,
        tree_segments=of_trees,
        tree=tree,
    )


def _group(segments: Sequence[Segment], is_tree: Sequence[bool]) -> list[list[Segment]]:
    groups: list[list[Segment]] = []
    longest = needed = 0
    follows_tree = False
    for segment, alone in zip(segments, is_tree, strict=True):
        length = segment.start + segment.num_tokens
        large = segment.num_tokens > _LARGEST_GROUPED_QUERY
        joins = (
            bool(groups)
            and not large
            and not alone
            and not follows_tree
            and groups[-1][-1].num_tokens <= _LARGEST_GROUPED_QUERY
            and groups[-1][-1].cache_slot + 1 == segment.cache_slot
            and max(longest, length) * (len(groups[-1]) + 1) <= _LARGEST_PADDING * (needed + length)
        )
        if joins:
            groups[-1].append(segment)
            longest, needed = max(longest, length), needed + length
        else:
            groups.append([segment])
            longest = needed = length
        follows_tree = alone
    return groups


def _attention_group(
    members: list[Segment], first_token: int, dtype: torch.dtype, device: torch.device
) -> AttentionGroup:
    counts = [segment.num_tokens for segment in members]
    num_queries, num_tokens = max(counts), sum(counts)
    kv_length = max(segment.start + segment.num_tokens for segment in members)
    padded = real = None
    if num_tokens != num_queries * len(members):
        # A padding query repeats its request's last token, so that it attends to at least one key.
        padded_index: list[int] = []
        real_index: list[int] = []
        token = 0
        for i, count in enumerate(counts):
            padded_index.extend(token + min(j, count - 1) for j in range(num_queries))
            real_index.extend(range(i * num_queries, i * num_queries + count))
            token += count
        padded = torch.tensor(padded_index, device=device)
        real = torch.tensor(real_index, device=device)
    mask = None
    if any(s.num_tokens > 1 or s.start + s.num_tokens != kv_length for s in members):
        last_key = torch.tensor(
            [[s.start + min(j, s.num_tokens - 1) for j in range(num_queries)] for s in members],
            device=device,
        )
        hidden = torch.arange(kv_length, device=device) > last_key.unsqueeze(2)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)
    return AttentionGroup(
        members[0].cache_slot,
        members[-1].cache_slot + 1,
        num_queries,
        kv_length,
        mask,
        first_token,
        num_tokens,
        padded,
        real,
    )
