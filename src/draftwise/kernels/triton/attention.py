"""A CUDA kernel for attention of a few new tokens per request to a long context.

PyTorch's flash kernels give every query head its own block of 64 or 128 queries. A verification
step fills about five of them, and the keys are read again for every head that shares them. This
kernel puts the new tokens of a request and all query heads that share keys (grouped queries,
Ainslie et al. 2023) into one small block. It computes the softmax block by block (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3). Where there are too few
requests to occupy the device, the keys are split between programs and the partial results are
merged afterwards. In layers with a window or chunks, a block reads only the keys that its tokens
attend to, from a ring if the layer has one. In a token tree, the bits of an integer per token tell
which of the new tokens it attends to. The kernel needs Triton, which is part of PyTorch's CUDA
builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.tree_tokens import MAX_TREE_TOKENS, TreePlaces

_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 64
# Heads of more bytes than this get half as large blocks, to fit in a multiprocessor's memory.
_LARGE_HEAD = 256
_MAX_SPLITS = 16
# Stands for no limit of a token's span.
_NO_LIMIT = 2**30
# Number of programs per multiprocessor up to which keys are split.
_PROGRAMS_PER_MULTIPROCESSOR = 2


# Triton would compile a new kernel for some values of arguments that vary from step to step.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "query_ends",
        "first_keys",
        "num_keys",
        "positions",
        "roots",
        "ancestors",
        "window",
        "chunk",
        "capacity",
        "ring",
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
    sinks,
    positions,
    roots,
    ancestors,
    scale,
    softcap,
    window,
    chunk,
    capacity,
    ring,
    kv_heads,
    num_blocks,
    splits,
    repeat: tl.constexpr,
    size: tl.constexpr,
    query_block: tl.constexpr,
    key_block: tl.constexpr,
    size_block: tl.constexpr,
    is_split: tl.constexpr,
    is_limited: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    has_trees: tl.constexpr,
    last_bit: tl.constexpr,
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
    if has_trees:
        root = tl.load(roots + begin + token, mask=real, other=0)
        tree = tl.load(ancestors + begin + token, mask=real, other=0)
    begins_at = 0
    if is_limited:
        # The first key of each token, the first one of the block, and the block of keys with it.
        if has_trees:
            position = tl.load(positions + begin + token, mask=real, other=0)
            visible = tl.maximum(position - (window - 1), position - position % chunk)
            least = tl.maximum(0, tl.min(tl.where(real, visible, total), 0))
        else:
            visible = tl.maximum(last - (window - 1), last - last % chunk)
            least = total - count + block * query_block // repeat
            least = tl.maximum(0, tl.maximum(least - (window - 1), least - least % chunk))
        begins_at = least // key_block * key_block
        first = first // capacity * ring
    share = tl.cdiv(tl.cdiv(total - begins_at, splits), key_block) * key_block
    low = begins_at + split * share
    high = tl.minimum(total, low + share)
    largest = tl.full([query_block], float("-inf"), tl.float32)
    norm = tl.zeros([query_block], tl.float32)
    if has_sinks:
        # As a key before the first one, whose value is zero.
        sink = tl.load(sinks + head * repeat + row % repeat).to(tl.float32)
        largest = tl.where(split == 0, sink, float("-inf"))
        norm = tl.where(largest == float("-inf"), 0.0, 1.0)
    result = tl.zeros([query_block, size_block], tl.float32)
    for start in range(low, high, key_block):
        key = start + tl.arange(0, key_block)
        present = key < high
        slot = key
        if is_limited:
            present = present & (key >= least)
            # A block of keys never wraps around, as its size divides that of the ring.
            slot = start % ring + tl.arange(0, key_block)
        place = ((first + slot) * kv_heads + head) * size
        k = tl.load(
            keys + place[None, :] + column[:, None],
            mask=present[None, :] & inside[:, None],
            other=0.0,
        )
        score = tl.dot(q, k, input_precision=precision) * scale
        if has_softcap:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), also where the exponential is infinite.
            score = softcap - 2.0 * softcap / (1.0 + tl.exp(2.0 * score / softcap))
        seen = (key[None, :] <= last[:, None]) & present[None, :]
        if has_trees:
            bit = key[None, :] - root[:, None]
            shift = tl.minimum(tl.maximum(bit, 0), last_bit).to(tl.int64)
            on_path = (tree[:, None] >> shift) & 1
            seen = seen & ((bit < 0) | (tree[:, None] == 0) | (on_path != 0))
        if is_limited:
            seen = seen & (key[None, :] >= visible[:, None])
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
    cache: KVCache,
    layer: int,
    query_ends: Tensor,
    first_keys: Tensor,
    num_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scores: Scores,
    trees: TreePlaces | None = None,
) -> Tensor:
    """Causal attention of each request's new tokens to all that a layer lets them attend to.

    Args:
        queries: ``[tokens, heads, size]``.
        cache: the cache, with the keys and values of the new tokens.
        layer: layer index.
        query_ends: ``[requests + 1]`` int32, 0 and the cumulative number of tokens per request.
        first_keys: ``[requests]`` or longer, int32, first token slot of each request in layers
            without a ring.
        num_keys: ``[requests]`` int32, tokens of each request so far, the new ones included.
        max_queries: upper bound of the tokens of one request.
        max_keys: upper bound of ``num_keys``.
        scores: how scores are computed.
        trees: places of the tokens in token trees; ``None`` without trees.

    Returns:
        ``[tokens, heads, size]``. Tokens that belong to no request are not written.
    """
    queries = queries.contiguous()
    keys, values = cache.token_slots(layer)
    shape, ring = cache.layers[layer], cache.sizes[layer]
    tokens, heads, size = queries.shape
    requests, kv_heads = len(num_keys), keys.shape[1]
    repeat = heads // kv_heads
    largest_block = _largest_block(keys)
    wanted = triton.next_power_of_2(max_queries * repeat)
    query_block = min(max(wanted, _SMALLEST_BLOCK), largest_block)
    num_blocks = triton.cdiv(max_queries * repeat, query_block)
    if shape.span is not None:
        max_keys = min(max_keys, shape.span + max_queries + largest_block)
    splits = _num_splits(
        requests * kv_heads * num_blocks, triton.cdiv(max_keys, largest_block), queries.device
    )
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
        out if scores.sinks is None else scores.sinks,
        query_ends if trees is None else trees.positions,
        query_ends if trees is None else trees.roots,
        query_ends if trees is None else trees.ancestors,
        size**-0.5 if scores.scaling is None else scores.scaling,
        1.0 if scores.softcap is None else scores.softcap,
        _NO_LIMIT if shape.window is None else shape.window,
        _NO_LIMIT if shape.chunk is None else shape.chunk,
        cache.capacity,
        ring,
        kv_heads,
        num_blocks,
        splits,
        repeat,
        size,
        query_block,
        largest_block,
        size_block,
        splits > 1,
        shape.span is not None,
        scores.softcap is not None,
        scores.sinks is not None,
        trees is not None,
        MAX_TREE_TOKENS - 1,
        "ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _join[(tokens * heads,)](
            parts, norms, out, splits, size, size_block, _MAX_SPLITS, num_warps=1
        )
    return out


def compile_for(heads: int, cache: KVCache, scores: Scores, trees: bool = False) -> None:
    """Compile all kernels that a model's layers may need, so that none is compiled while serving.

    Triton caches them on disk for later processes.

    Args:
        heads: query heads.
        cache: any cache of the model. It is only read.
        scores: how its layers compute scores.
        trees: whether the kernels are those of passes over token trees.
    """
    for layer in {shape: index for index, shape in enumerate(cache.layers)}.values():
        keys, _ = cache.token_slots(layer)
        repeat = heads // keys.shape[1]
        block = _SMALLEST_BLOCK
        while block <= _largest_block(keys):
            # With and without a split of the keys.
            for max_keys in (_LARGEST_BLOCK * _MAX_SPLITS, 1):
                ends = torch.arange(2, dtype=torch.int32, device=keys.device)
                first = torch.zeros_like(ends)
                queries = torch.zeros(1, heads, keys.shape[2], dtype=keys.dtype, device=keys.device)
                most = max(1, block // repeat)
                places = TreePlaces(first, first, first.long()) if trees else None
                attend(
                    *(queries, cache, layer, ends, first, first[1:] + 1, most, max_keys, scores),
                    places,
                )
            block *= 2


def _largest_block(keys: Tensor) -> int:
    """Largest number of rows of queries, and number of keys, that a program reads at once."""
    size_block = max(16, triton.next_power_of_2(keys.shape[2]))
    fits = size_block * keys.element_size() <= _LARGE_HEAD
    return _LARGEST_BLOCK if fits else _LARGEST_BLOCK // 2


def _num_splits(num_programs: int, num_key_blocks: int, device: torch.device) -> int:
    """Number of parts that the keys are split into, a power of two."""
    if device.type != "cuda":
        return 4 if num_programs < 16 else 1
    wanted = (
        _PROGRAMS_PER_MULTIPROCESSOR
        * torch.cuda.get_device_properties(device).multi_processor_count
    )
    useful: int = min(_MAX_SPLITS, num_key_blocks, wanted // num_programs)
    return 1 << max(0, useful.bit_length() - 1)
