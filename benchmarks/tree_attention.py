"""Cost of token trees on the CPU: attention, and whole passes with a chain drawn as a tree.

    python benchmarks/tree_attention.py --output benchmarks/results/tree_attention.json

- ``attention``: a tree of 32 new tokens relative to a chain of 32 new tokens, over all layers.
- ``passes``: a chain that is given as a tree relative to the same chain, in passes of a model.

All alternatives of a row take turns in one process. Medians of ratios, with standard errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from turns import ratio_of_turns, take_turns

from draftwise.benchmark.report import write_report
from draftwise.models.attention import attend
from draftwise.models.attention_scores import Scores
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.loading import LoadedModel, load_model
from draftwise.models.packing import PackedBatch, pack
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import SegmentTree, whole_tree

KV_HEADS, HEADS_PER_KV, HEAD_SIZE, LAYERS = 6, 3, 64, 12
TREE_TOKENS = 32
CONTEXTS = (200, 1000, 4000)
BATCH_SIZES = (1, 4, 8)
CHAIN_TOKENS = (2, 6, 16)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CPU = torch.device("cpu")


def random_tree(start: int, size: int, seed: int) -> SegmentTree:
    """A tree whose nodes have any earlier node as their parent."""
    random = np.random.default_rng(seed)
    return whole_tree(start, [int(random.integers(-1, node)) for node in range(size - 1)])


def chain(start: int, size: int) -> SegmentTree:
    """A chain as a tree."""
    return whole_tree(start, range(-1, size - 2))


def of_attention(
    batch_size: int, context: int, dtype: torch.dtype, repeats: int
) -> tuple[float, float]:
    """A tree of 32 tokens relative to a chain of 32 tokens."""
    layers = [LayerShape(KV_HEADS, HEAD_SIZE, HEAD_SIZE)] * LAYERS
    cache = KVCache(layers, batch_size, context + TREE_TOKENS, dtype, CPU)
    segments = [Segment(row, context, TREE_TOKENS) for row in range(batch_size)]
    heads = KV_HEADS * HEADS_PER_KV
    joined = torch.randn(batch_size * TREE_TOKENS, heads + 2 * KV_HEADS, HEAD_SIZE).to(dtype)
    q, k, v = joined.split([heads, KV_HEADS, KV_HEADS], dim=1)

    def attention(packed: PackedBatch) -> Callable[[], None]:
        def run() -> None:
            for layer in range(LAYERS):
                attend(packed, layer, q, k, v, Scores())

        return run

    trees = [random_tree(context, TREE_TOKENS, row) for row in range(batch_size)]
    alternatives = {
        "chain": attention(pack(cache, segments, dtype, CPU)),
        "tree": attention(pack(cache, segments, dtype, CPU, trees)),
    }
    times = take_turns(alternatives, repeats)
    return ratio_of_turns(times["chain"], times["tree"])


def of_passes(
    model: LoadedModel, batch_size: int, tokens_each: int, context: int, repeats: int
) -> tuple[float, float]:
    """A pass with chains as trees relative to a pass with chains."""
    cache = model.model.new_cache(batch_size, context + tokens_each)
    generator = torch.Generator().manual_seed(0)
    count = batch_size * tokens_each
    tokens = torch.randint(0, model.model.vocab_size, (count,), generator=generator).tolist()
    segments = [Segment(row, context, tokens_each) for row in range(batch_size)]

    def forward(trees: Sequence[SegmentTree] | None) -> Callable[[], object]:
        return lambda: model.model.forward(cache, tokens, segments, range(count), trees=trees)

    trees = [chain(context, tokens_each)] * batch_size
    times = take_turns({"chain": forward(None), "tree": forward(trees)}, repeats)
    return ratio_of_turns(times["chain"], times["tree"])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    attention: list[dict[str, Any]] = []
    for name, dtype in DTYPES.items():
        for context in CONTEXTS:
            for size in BATCH_SIZES:
                ratio, error = of_attention(size, context, dtype, arguments.repeats)
                attention.append(
                    {
                        "dtype": name,
                        "context": context,
                        "batch_size": size,
                        "tree_over_chain": round(ratio, 3),
                        "standard_error": round(error, 3),
                    }
                )
    model = load_model(arguments.target, "target", torch.bfloat16, CPU, 2 * CONTEXTS[0])
    passes: list[dict[str, Any]] = []
    for size in BATCH_SIZES:
        for tokens in CHAIN_TOKENS:
            ratio, error = of_passes(model, size, tokens, CONTEXTS[0], arguments.repeats)
            passes.append(
                {
                    "batch_size": size,
                    "tokens_each": tokens,
                    "chain_as_tree_over_chain": round(ratio, 3),
                    "standard_error": round(error, 3),
                }
            )
    for title, rows in (("attention", attention), ("passes", passes)):
        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(str, row.values()))
        Console().print(table)
    if arguments.output:
        figures = {"attention": attention, "passes": passes}
        write_report(arguments.output, vars(arguments), figures)


if __name__ == "__main__":
    main()
