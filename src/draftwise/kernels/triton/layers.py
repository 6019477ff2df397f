"""Three CUDA kernels for the operations between the matrix products of a decoder layer.

In a decoding step these operations are so small that launching kernels and accessing memory
dominates their time. Fused, there are fewer of both. The variants of
:class:`draftwise.models.decoder_spec.LayerSpec` are compile-time flags, so that a model without a
variant does not pay for it. The kernels need Triton, which is part of PyTorch's CUDA builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwise.models.decoder_spec import Activation
from draftwise.models.norm import Norm

_LARGEST_BLOCK = 1024
_HEAD_BLOCK = 16


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    hidden,
    delta,
    delta_weight,
    weight,
    total,
    normed,
    delta_epsilon,
    epsilon,
    scale,
    size: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    norms_delta: tl.constexpr,
    norms: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, block)
    inside = column < size
    x = tl.load(hidden + row + column, mask=inside, other=0.0).to(tl.float32)
    if adds:
        d = tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)
        if norms_delta:
            factor = tl.load(delta_weight + column, mask=inside, other=0.0).to(tl.float32)
            d = d * tl.rsqrt(tl.sum(d * d, axis=0) / size + delta_epsilon) * factor
        rounded = (x + d * scale).to(total.dtype.element_ty)
        tl.store(total + row + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if norms:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon) * factor
        tl.store(normed + row + column, x, mask=inside)


@triton.jit
def _weighted(numbers, scale, q_weight, k_weight, is_query, column, inside):  # type: ignore[no-untyped-def]
    """Normalised numbers of queries and keys."""
    of_query = tl.load(q_weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(k_weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return numbers.to(tl.float32) * scale * tl.where(is_query, of_query, of_key)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv,
    cosine,
    sine,
    q_weight,
    k_weight,
    token_slots,
    queries,
    keys,
    values,
    q_epsilon,
    k_epsilon,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
    rest_block: tl.constexpr,
    norms: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * head_block + tl.arange(0, head_block))[:, None]
    column = tl.arange(0, block)
    within = column < half
    inside = within[None, :]
    every = head < heads + 2 * kv_heads
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    is_value = (head >= heads + kv_heads) & every
    slot = tl.load(token_slots + token).to(tl.int64)
    source = qkv + (token * (heads + 2 * kv_heads) + head) * size
    query = queries + (token * heads + head) * size
    key = keys + (slot * kv_heads + head - heads) * size
    value = values + (slot * kv_heads + head - heads - kv_heads) * size
    left = tl.load(source + column[None, :], mask=every & inside, other=0.0)
    right = tl.load(source + half + column[None, :], mask=every & inside, other=0.0)
    x, y = left.to(tl.float32), right.to(tl.float32)
    # The numbers after the rotated ones, if there are any.
    beyond = 2 * half + tl.arange(0, rest_block)
    outside = beyond < size
    if 2 * half < size:
        rest = tl.load(source + beyond[None, :], mask=every & outside[None, :], other=0.0)
        z = rest.to(tl.float32)
    if norms:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        if 2 * half < size:
            squares += tl.sum(z * z, axis=1)
        scale = tl.rsqrt(squares[:, None] / size + tl.where(is_query, q_epsilon, k_epsilon))
        # Rounded as a norm of its own rounds.
        kind: tl.constexpr = qkv.dtype.element_ty
        x = _weighted(x, scale, q_weight, k_weight, is_query, column, within)
        y = _weighted(y, scale, q_weight, k_weight, is_query, half + column, within)
        x, y = x.to(kind).to(tl.float32), y.to(kind).to(tl.float32)
        if 2 * half < size:
            z = _weighted(z, scale, q_weight, k_weight, is_query, beyond, outside)
    angle = token * half + column
    cos = tl.load(cosine + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sine + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    new_left = x * cos - y * sin
    new_right = y * cos + x * sin
    tl.store(query + column[None, :], new_left, mask=is_query & inside)
    tl.store(query + half + column[None, :], new_right, mask=is_query & inside)
    tl.store(key + column[None, :], new_left, mask=is_key & inside)
    tl.store(key + half + column[None, :], new_right, mask=is_key & inside)
    tl.store(value + column[None, :], left, mask=is_value & inside)
    tl.store(value + half + column[None, :], right, mask=is_value & inside)
    if 2 * half < size:
        tl.store(query + beyond[None, :], z, mask=is_query & outside[None, :])
        tl.store(key + beyond[None, :], z, mask=is_key & outside[None, :])
        tl.store(value + beyond[None, :], rest, mask=is_value & outside[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate_up, out, size, activation: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    if activation == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif activation == "gelu_tanh":
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)), with 2z = √(8/π)·(x + 0.044715·x³).
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-z))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * size + column, gate * up, mask=inside)


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    delta_norm: Norm | None,
    norm: Norm | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream and normalise the sum.

    Args:
        hidden: residual stream ``[tokens, size]``, contiguous.
        delta: the block's output ``[tokens, size]``, contiguous; ``None`` for none.
        delta_norm: norm of the block's output before it is added; ``None`` for none.
        norm: norm of the sum; ``None`` for none.
        scale: factor of the block's output before it is added.

    Returns:
        The sum and its normalised form, both ``[tokens, size]``.
    """
    if delta is None and norm is None:
        return hidden, hidden
    tokens, size = hidden.shape
    total = hidden if delta is None else torch.empty_like(hidden)
    normed = total if norm is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_norm[(tokens,)](
        hidden,
        hidden if delta is None else delta,
        hidden if delta_norm is None else delta_norm.weight,
        hidden if norm is None else norm.weight,
        total,
        normed,
        0.0 if delta_norm is None else delta_norm.epsilon,
        0.0 if norm is None else norm.epsilon,
        float(scale),
        size,
        block,
        delta is not None,
        delta_norm is not None,
        norm is not None,
        num_warps=min(16, max(1, block // 512)),
    )
    return total, normed


def rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    token_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
) -> Tensor:
    """Apply rotary position embedding to queries and keys; write keys and values to the cache.

    Args:
        qkv: ``[tokens, (heads + 2 * kv_heads) * head_size]`` contiguous.
        cosine: ``[tokens, rotated / 2]`` contiguous, cosines of the angles.
        sine: ``[tokens, rotated / 2]`` contiguous, sines of the angles.
        q_norm: norm of each query head before it is rotated; ``None`` for none.
        k_norm: the same for the keys; ``None`` where ``q_norm`` is.
        token_slots: ``[tokens]`` int64, token slot that each token is written to.
        keys: ``[token_slots, kv_heads, head_size]`` keys of the cache.
        values: ``[token_slots, kv_heads, head_size]`` values of the cache.
        num_heads: query heads.

    Returns:
        ``[tokens, heads, head_size]`` queries.
    """
    kv_heads, head_size = keys.shape[1:]
    tokens, half = cosine.shape
    queries = torch.empty(tokens, num_heads, head_size, dtype=qkv.dtype, device=qkv.device)
    every = num_heads + 2 * kv_heads
    head_block = min(_HEAD_BLOCK, triton.next_power_of_2(every))
    norms = q_norm is not None and k_norm is not None
    _rotate_and_store[(tokens, triton.cdiv(every, head_block))](
        qkv,
        cosine,
        sine,
        qkv if q_norm is None else q_norm.weight,
        qkv if k_norm is None else k_norm.weight,
        token_slots,
        queries,
        keys,
        values,
        0.0 if q_norm is None else q_norm.epsilon,
        0.0 if k_norm is None else k_norm.epsilon,
        num_heads,
        kv_heads,
        head_size,
        half,
        head_block,
        triton.next_power_of_2(half),
        triton.next_power_of_2(max(1, head_size - 2 * half)),
        norms,
        num_warps=4,
    )
    return queries


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """The activation of the first half times the second half.

    Args:
        gate_up: ``[tokens, 2 * size]``.
        activation: the activation.

    Returns:
        ``[tokens, size]``.
    """
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(size))
    _gated[(tokens, triton.cdiv(size, block))](
        gate_up, out, size, activation.value, block, num_warps=4
    )
    return out
