"""Attention of decoding steps on the CPU: the native kernel and PyTorch's, interleaved.

python benchmarks/attention.py --output benchmarks/results/attention.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from turns import take_turns

from draftwise.benchmark.report import write_report
from draftwise.kernels.native.library import kernel_in_use
from draftwise.models import packing
from draftwise.models.attention import attend
from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.packing import PackedBatch, pack
from draftwise.models.segment import Segment

KV_HEADS, HEADS_PER_KV, HEAD_SIZE = 6, 3, 64
BATCH_SIZES = (1, 8, 32)
QUERIES = ("1", "2", "3", "ragged")
CONTEXTS = (200, 1000)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CPU = torch.device("cpu")


def segments_of(batch_size: int, queries: str, context: int) -> list[Segment]:
    """Equal requests, or ragged ones: 1 to 5 new tokens, and 0.2 to 2 times the context."""
    if queries != "ragged":
        count = int(queries)
        return [Segment(row, context - count, count) for row in range(batch_size)]
    generator = torch.Generator().manual_seed(0)
    segments = []
    for row in range(batch_size):
        length = int(torch.randint(context // 5, 2 * context, (1,), generator=generator))
        count = int(torch.randint(1, 6, (1,), generator=generator))
        segments.append(Segment(row, length - count, count))
    return segments


def plan_without_kernel(cache: KVCache, segments: list[Segment], dtype: torch.dtype) -> PackedBatch:
    kernel = packing.native_attention
    try:
        packing.native_attention = lambda *_: None
        return pack(cache, segments, dtype, CPU)
    finally:
        packing.native_attention = kernel


@torch.inference_mode()
def measure(
    caches: dict[int, KVCache], setting: tuple[int, str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
    batch_size, queries, context = setting
    dtype = DTYPES[arguments.dtype]
    segments = segments_of(batch_size, queries, context)
    tokens = sum(segment.num_tokens for segment in segments)
    heads = KV_HEADS * HEADS_PER_KV
    joined = torch.randn(tokens, heads + 2 * KV_HEADS, HEAD_SIZE).to(dtype)
    q, k, v = joined.split([heads, KV_HEADS, KV_HEADS], dim=1)
    cache = caches[context]

    def layers(packed: PackedBatch) -> Callable[[], None]:
        def run() -> None:
            for layer in range(arguments.layers):
                attend(packed, layer, q, k, v, Scores())

        return run

    kernels = {
        "native": layers(pack(cache, segments, dtype, CPU)),
        "pytorch": layers(plan_without_kernel(cache, segments, dtype)),
    }
    every = take_turns(kernels, arguments.repeats, num_untimed=1)
    times = {name: statistics.median(turns) for name, turns in every.items()}
    length = sum(segment.start + segment.num_tokens for segment in segments)
    gigabytes = length * cache.bytes_per_token / 1e9
    return {
        "batch_size": batch_size,
        "queries": queries,
        "context": context,
        "native_over_pytorch": round(times["native"] / times["pytorch"], 3),
        "native_ms": round(times["native"], 3),
        "pytorch_ms": round(times["pytorch"], 3),
        "native_gigabytes_per_s": round(gigabytes / times["native"] * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if kernel_in_use() != "native":
        raise SystemExit(f"the native kernels are not available: {kernel_in_use()}")

    shapes = [LayerShape(KV_HEADS, HEAD_SIZE, HEAD_SIZE)] * arguments.layers
    caches = {}
    for context in CONTEXTS:
        cache = KVCache(shapes, max(BATCH_SIZES), 2 * context, DTYPES[arguments.dtype], CPU)
        for layer in range(arguments.layers):
            for each in cache.read(layer, 0, cache.num_cache_slots, cache.capacity):
                each.copy_(torch.randn(1, KV_HEADS, 1, HEAD_SIZE).expand(each.shape))
        caches[context] = cache
    rows = []
    for setting in itertools.product(BATCH_SIZES, QUERIES, CONTEXTS):
        rows.append(measure(caches, setting, arguments))
        print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"attention": rows})


if __name__ == "__main__":
    main()
