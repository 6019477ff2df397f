"""Attention over packed tokens.

The linear layers of a model compute one sequence of packed tokens without padding. In attention,
each token attends to its own request's cache slot. On a CPU, a native kernel computes all requests
with few new tokens. Otherwise, requests in neighbouring cache slots with a similar amount of work
form a group, which is padded and computed in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.native.attention import NativeAttention, native_attention
from draftwise.models.ragged import RaggedAttention
from draftwise.models.tree_tokens import SegmentTree, hidden_in_tree, tree_tokens

# A segment with more queries than this (a chunk of a prompt) is computed on its own.
_LARGEST_GROUPED_QUERY = 32
# Largest ratio of a group's key positions with padding to those without.
_LARGEST_PADDING = 2


class Segment(NamedTuple):
    """Consecutive new tokens of one request.

    Attributes:
        cache_slot: the request's place in the cache.
        start: position of the first new token.
        num_tokens: number of new tokens.
    """

    cache_slot: int
    start: int
    num_tokens: int


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


def attend(
    packed: PackedBatch, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores
) -> Tensor:
    """Store the new keys and values of a layer, then compute causal attention.

    Args:
        packed: plan of this forward pass.
        layer: layer index.
        q: ``[tokens, heads, key_size]``.
        k: ``[tokens, kv_heads, key_size]``.
        v: ``[tokens, kv_heads, value_size]``.
        scores: how scores are computed.

    Returns:
        ``[tokens, heads, value_size]``, contiguous.
    """
    if packed.native is not None and not packed.segments:
        return packed.native(layer, q, k, v, scores, writes=True)
    packed.cache.write(layer, packed.slots(layer), k, v)
    if packed.ragged is not None:
        return packed.ragged.attend(packed.cache, layer, q, scores).contiguous()
    if packed.native is not None:
        result = packed.native(layer, q, k, v, scores, writes=False)
    else:
        result = q.new_empty(len(q), q.shape[1], v.shape[2])
    segments = packed.segments
    if scores.is_plain and packed.cache.layers[layer].span is None:
        for group in packed.groups:
            tokens = slice(group.first_token, group.first_token + group.num_tokens)
            result[tokens] = _attend(layer, packed.cache, group, q, scores.scaling)
        segments = packed.tree_segments
    for segment, first_token in segments:
        tokens = slice(first_token, first_token + segment.num_tokens)
        tree = None if packed.tree is None else packed.tree[tokens]
        result[tokens] = _attend_segment(layer, packed.cache, segment, q[tokens], scores, tree)
    return result


def _attend_segment(
    layer: int,
    cache: KVCache,
    segment: Segment,
    q: Tensor,
    scores: Scores,
    tree: NDArray[np.void] | None,
) -> Tensor:
    """``[num_tokens, heads, value_size]`` of one request, for every kind of attention."""
    shape = cache.layers[layer]
    start, end = segment.start, segment.start + segment.num_tokens
    if tree is not None and not tree["ancestors"][0]:
        tree = None  # the segment is a chain beside trees
    first = shape.first_visible(start if tree is None else int(tree["root"][0]))
    keys, values = cache.read_span(layer, segment.cache_slot, first, end)  # [kv_heads, keys, size]
    key_position = torch.arange(first, end, device=q.device)
    if tree is None:
        position = torch.arange(start, end, device=q.device).unsqueeze(1)
        is_hidden = key_position > position
    else:
        position = torch.tensor(tree["position"], device=q.device).unsqueeze(1)
        is_hidden = hidden_in_tree(tree, start, first, q.device)
    is_hidden = is_hidden | (key_position < shape.first_visible_of(position))
    num_tokens, heads, key_size = q.shape
    grouped = q.view(num_tokens, len(keys), heads // len(keys), key_size).permute(1, 2, 0, 3)
    out = scores.attend(grouped, keys, values, is_hidden)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, heads, -1)


def _attend(
    layer: int, cache: KVCache, group: AttentionGroup, q: Tensor, scaling: float | None
) -> Tensor:
    """``[num_tokens, heads, value_size]`` for one group."""
    q = q[group.first_token : group.first_token + group.num_tokens]
    if group.padded is not None:
        q = q[group.padded]
    keys, values = cache.read(layer, group.first_cache_slot, group.end_cache_slot, group.kv_length)
    rows, kv_heads = keys.shape[:2]
    repeat = q.shape[1] // kv_heads
    length = group.num_queries
    # Query heads that share keys are folded into the query dimension, so that keys are not copied.
    folded = q.view(rows, length, kv_heads, repeat, -1).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, repeat * length, q.shape[2])
    out = F.scaled_dot_product_attention(
        folded, keys, values, attn_mask=group.folded_mask(repeat), scale=scaling
    )
    out = out.view(rows, kv_heads, repeat, length, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows * length, kv_heads * repeat, -1)
    return out if group.real is None else out[group.real]
