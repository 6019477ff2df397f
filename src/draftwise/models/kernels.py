"""Three CUDA kernels for the operations between the matrix products of a Llama layer.

In a decoding step these operations are so small that launching kernels and accessing memory
dominates their time. Fused, there are fewer of both. They need Triton, which is part of PyTorch's
CUDA builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_BLOCK = 1024
_HEAD_BLOCK = 16


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    hidden,
    delta,
    weight,
    total,
    normed,
    epsilon,
    size: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, block)
    inside = column < size
    x = tl.load(hidden + row + column, mask=inside, other=0.0)
    if adds:
        x = x + tl.load(delta + row + column, mask=inside, other=0.0)
        tl.store(total + row + column, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, x * scale * factor, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv,
    cosine,
    sine,
    token_slots,
    queries,
    keys,
    values,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = 2 * half
    head = (tl.program_id(1) * head_block + tl.arange(0, head_block))[:, None]
    column = tl.arange(0, block)
    inside = (column < half)[None, :]
    every = (head < heads + 2 * kv_heads) & inside
    source = qkv + (token * (heads + 2 * kv_heads) + head) * size + column[None, :]
    left = tl.load(source, mask=every, other=0.0)
    right = tl.load(source + half, mask=every, other=0.0)
    angle = token * size + column
    within = column < half
    left_cosine = tl.load(cosine + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    left_sine = tl.load(sine + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    right_cosine = tl.load(cosine + half + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    right_sine = tl.load(sine + half + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    x, y = left.to(tl.float32), right.to(tl.float32)
    new_left = x * left_cosine - y * left_sine
    new_right = y * right_cosine + x * right_sine
    query = queries + (token * heads + head) * size + column[None, :]
    is_query = (head < heads) & inside
    tl.store(query, new_left, mask=is_query)
    tl.store(query + half, new_right, mask=is_query)
    slot = tl.load(token_slots + token).to(tl.int64)
    key = keys + (slot * kv_heads + head - heads) * size + column[None, :]
    is_key = (head >= heads) & (head < heads + kv_heads) & inside
    tl.store(key, new_left, mask=is_key)
    tl.store(key + half, new_right, mask=is_key)
    value = values + (slot * kv_heads + head - heads - kv_heads) * size + column[None, :]
    is_value = (head >= heads + kv_heads) & every
    tl.store(value, left, mask=is_value)
    tl.store(value + half, right, mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate_up, out, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * size + column, gate * up, mask=inside)


def add_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream and apply RMS normalisation.

    Args:
        hidden: residual stream ``[tokens, size]``, contiguous.
        delta: the block's output ``[tokens, size]``, contiguous; ``None`` for none.
        weight: ``[size]``.
        epsilon: added to the mean square.

    Returns:
        The sum and its normalised form, both ``[tokens, size]``.
    """
    tokens, size = hidden.shape
    total = hidden if delta is None else torch.empty_like(hidden)
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    _add_norm[(tokens,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        total,
        normed,
        epsilon,
        size,
        block,
        delta is not None,
        num_warps=min(16, max(1, block // 512)),
    )
    return total, normed


def rotate_and_store(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    token_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
) -> Tensor:
    """Apply rotary position embedding to queries and keys; write keys and values to the cache.

    Args:
        qkv: ``[tokens, (heads + 2 * kv_heads) * head_size]`` contiguous.
        cosine: ``[tokens, head_size]`` contiguous, cosines of the angles; both halves are equal.
        sine: ``[tokens, head_size]`` contiguous, sines of the angles; both halves are equal.
        token_slots: ``[tokens]`` int64, token slot that each token is written to.
        keys: ``[token_slots, kv_heads, head_size]`` keys of the cache.
        values: ``[token_slots, kv_heads, head_size]`` values of the cache.
        num_heads: query heads.

    Returns:
        ``[tokens, heads, head_size]`` queries.
    """
    kv_heads, head_size = keys.shape[1:]
    tokens = len(qkv)
    queries = torch.empty(tokens, num_heads, head_size, dtype=qkv.dtype, device=qkv.device)
    half = head_size // 2
    every = num_heads + 2 * kv_heads
    head_block = min(_HEAD_BLOCK, triton.next_power_of_2(every))
    _rotate_and_store[(tokens, triton.cdiv(every, head_block))](
        qkv,
        cosine,
        sine,
        token_slots,
        queries,
        keys,
        values,
        num_heads,
        kv_heads,
        half,
        head_block,
        triton.next_power_of_2(half),
        num_warps=4,
    )
    return queries


def gated(gate_up: Tensor) -> Tensor:
    """SiLU of the first half times the second half.

    Args:
        gate_up: ``[tokens, 2 * size]``.

    Returns:
        ``[tokens, size]``.
    """
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(size))
    _gated[(tokens, triton.cdiv(size, block))](gate_up, out, size, block, num_warps=4)
    return out
