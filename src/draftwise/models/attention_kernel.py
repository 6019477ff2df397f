"""A CUDA kernel for attention of a few new tokens per request to a long context.

PyTorch's flash kernels give every query head its own block of 64 or 128 queries. A verification
step fills about five of them, and the keys are read again for every head that shares them. This
kernel puts the new tokens of a request and all query heads that share keys (grouped queries,
Ainslie et al. 2023) into one small block. It computes the softmax block by block (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3). Where there are too few
requests to occupy the device, the keys are split between programs and the partial results are
merged afterwards. The kernel needs Triton, which is part of PyTorch's CUDA builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 64
_KEY_BLOCK = 64
_MAX_SPLITS = 16
# Number of programs per multiprocessor up to which keys are split.
_PROGRAMS_PER_MULTIPROCESSOR = 2


# Triton would compile a new kernel for some values of arguments that vary from step to step.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "query_ends",
        "first_keys",
        "num_keys",
        "kv_heads",
        "num_blocks",
        "splits",
    ]
)
def _attend(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    out,
    parts,
    norms,
    query_ends,
    first_keys,
    num_keys,
    scale,
    kv_heads,
    num_blocks,
    splits,
    repeat: tl.constexpr,
    size: tl.constexpr,
    query_block: tl.constexpr,
    key_block: tl.constexpr,
    size_block: tl.constexpr,
    is_split: tl.constexpr,
    precision: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1) // num_blocks
    block = tl.program_id(1) % num_blocks
    split = tl.program_id(2)
    begin = tl.load(query_ends + request)
    count = tl.load(query_ends + request + 1) - begin
    if block * query_block >= count * repeat:
        return
    total = tl.load(num_keys + request)
    first = tl.load(first_keys + request).to(tl.int64)
    row = block * query_block + tl.arange(0, query_block)
    token = row // repeat
    real = token < count
    entry = (begin + token).to(tl.int64) * (kv_heads * repeat) + head * repeat + row % repeat
    column = tl.arange(0, size_block)
    inside = column < size
    mask = real[:, None] & inside[None, :]
    q = tl.load(queries + entry[:, None] * size + column[None, :], mask=mask, other=0.0)
    last = total - count + token
    share = tl.cdiv(tl.cdiv(total, splits), key_block) * key_block
    low = split * share
    high = tl.minimum(total, low + share)
    largest = tl.full([query_block], float("-inf"), tl.float32)
    norm = tl.zeros([query_block], tl.float32)
    result = tl.zeros([query_block, size_block], tl.float32)
    for start in range(low, high, key_block):
        key = start + tl.arange(0, key_block)
        present = key < high
        place = ((first + key) * kv_heads + head) * size
        k = tl.load(
            keys + place[None, :] + column[:, None],
            mask=present[None, :] & inside[:, None],
            other=0.0,
        )
        score = tl.dot(q, k, input_precision=precision) * scale
        seen = (key[None, :] <= last[:, None]) & present[None, :]
        score = tl.where(seen, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp(score - finite[:, None])
        fading = tl.exp(largest - finite)
        v = tl.load(
            values + place[:, None] + column[None, :],
            mask=present[:, None] & inside[None, :],
            other=0.0,
        )
        result = result * fading[:, None]
        result += tl.dot(weight.to(v.dtype), v, input_precision=precision)
        norm = norm * fading + tl.sum(weight, 1)
        largest = larger
    if not is_split:
        result = result / norm[:, None]
        tl.store(out + entry[:, None] * size + column[None, :], result, mask=mask)
    else:
        entry = entry * splits + split
        tl.store(parts + entry[:, None] * size + column[None, :], result, mask=mask)
        tl.store(norms + entry * 2, largest, mask=real)
        tl.store(norms + entry * 2 + 1, norm, mask=real)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    parts,
    norms,
    out,
    splits,
    size: tl.constexpr,
    size_block: tl.constexpr,
    max_splits: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, max_splits)
    there = split < splits
    column = tl.arange(0, size_block)
    inside = column < size
    place = norms + (entry * splits + split) * 2
    largest = tl.load(place, mask=there, other=float("-inf"))
    norm = tl.load(place + 1, mask=there, other=0.0)
    weight = tl.exp(largest - tl.max(largest, 0))
    part = tl.load(
        parts + (entry * splits + split[:, None]) * size + column[None, :],
        mask=there[:, None] & inside[None, :],
        other=0.0,
    )
    result = tl.sum(part * weight[:, None], 0) / tl.sum(norm * weight, 0)
    tl.store(out + entry * size + column, result, mask=inside)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_ends: Tensor,
    first_keys: Tensor,
    num_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float | None,
) -> Tensor:
    """Causal attention of each request's new tokens to all its tokens in the cache.

    Args:
        queries: ``[tokens, heads, size]``.
        keys: ``[token_slots, kv_heads, size]`` contiguous.
        values: ``[token_slots, kv_heads, size]`` contiguous.
        query_ends: ``[requests + 1]`` int32, 0 and the cumulative number of tokens per request.
        first_keys: ``[requests]`` or longer, int32, first token slot of each request.
        num_keys: ``[requests]`` int32, tokens of each request in the cache, the new ones included.
        max_queries: upper bound of the tokens of one request.
        max_keys: upper bound of the keys of one request.
        scaling: factor of the scores; ``None`` for 1/√size.

    Returns:
        ``[tokens, heads, size]``. Tokens that belong to no request are not written.
    """
    queries = queries.contiguous()
    tokens, heads, size = queries.shape
    requests, kv_heads = len(num_keys), keys.shape[1]
    repeat = heads // kv_heads
    wanted = triton.next_power_of_2(max_queries * repeat)
    query_block = min(max(wanted, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    num_blocks = triton.cdiv(max_queries * repeat, query_block)
    splits = _num_splits(requests * kv_heads * num_blocks, max_keys, queries.device)
    size_block = max(16, triton.next_power_of_2(size))
    out = torch.empty_like(queries)
    parts = norms = out
    if splits > 1:
        numbers = {"dtype": torch.float32, "device": queries.device}
        parts = torch.empty(tokens, heads, splits, size, **numbers)  # type: ignore[call-overload]
        norms = torch.empty(tokens, heads, splits, 2, **numbers)  # type: ignore[call-overload]
    _attend[(requests, kv_heads * num_blocks, splits)](
        queries,
        keys,
        values,
        out,
        parts,
        norms,
        query_ends,
        first_keys,
        num_keys,
        size**-0.5 if scaling is None else scaling,
        kv_heads,
        num_blocks,
        splits,
        repeat,
        size,
        query_block,
        _KEY_BLOCK,
        size_block,
        splits > 1,
        "ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _join[(tokens * heads,)](
            parts, norms, out, splits, size, size_block, _MAX_SPLITS, num_warps=1
        )
    return out


def compile_for(heads: int, keys: Tensor) -> None:
    """Compile all kernels that a model's layers may need, so that none is compiled while serving.

    Triton caches them on disk for later processes.

    Args:
        heads: query heads.
        keys: ``[token_slots, kv_heads, size]`` keys of any layer's cache. They are only read.
    """
    repeat = heads // keys.shape[1]
    block = _SMALLEST_BLOCK
    while block <= _LARGEST_BLOCK:
        # With and without a split of the keys.
        for requests, max_keys in ((1, _KEY_BLOCK * _MAX_SPLITS), (1, 1)):
            ends = torch.arange(requests + 1, dtype=torch.int32, device=keys.device)
            first = torch.zeros_like(ends)
            queries = torch.zeros(
                requests, heads, keys.shape[2], dtype=keys.dtype, device=keys.device
            )
            most = max(1, block // repeat)
            attend(queries, keys, keys, ends, first, first[1:] + 1, most, max_keys, None)
        block *= 2


def _num_splits(num_programs: int, max_keys: int, device: torch.device) -> int:
    """Number of parts that the keys are split into, a power of two."""
    if device.type != "cuda":
        return 4 if num_programs < 16 else 1
    wanted = (
        _PROGRAMS_PER_MULTIPROCESSOR
        * torch.cuda.get_device_properties(device).multi_processor_count
    )
    useful: int = min(_MAX_SPLITS, -(-max_keys // _KEY_BLOCK), wanted // num_programs)
    return 1 << max(0, useful.bit_length() - 1)
