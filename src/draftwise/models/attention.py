"""Attention of packed tokens to the keys and values of their requests."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.packing import AttentionGroup, PackedBatch
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import hidden_in_tree


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
