"""Cost and information of companions.

1. Passes of the draft, plain and quantised, with torchao's weights packed or expanded.
2. A companion's pass over a draft, relative to the draft passes that generated it.
3. Information gain of each companion's S and A about acceptance, on the same drafted tokens.

    python benchmarks/companions.py --passes 18
    python benchmarks/companions.py --prompts gsm8k_train.jsonl --num-prompts 96

Passes of all models are interleaved and compared by their 10th percentile, which is least affected
by other load on the machine. Only ratios are meaningful.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.engine.assembly import Models
from draftwise.estimators.information import information_gains, pearson
from draftwise.models import loading
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment
from draftwise.profiling.acceptance import collect
from draftwise.prompts import load_prompts

CONTEXT = 128
NUM_ROWS = 32


class Passes:
    """Times packed passes of one model over rows with some context."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model
        self._cache = model.new_cache(NUM_ROWS, 2 * CONTEXT)
        self.seconds: dict[tuple[int, int], list[float]] = {}

    def time(self, rows: int, each: int) -> None:
        """Time passes over ``each`` tokens of ``rows`` requests, with the logits of all tokens.

        The first pass is not counted, as kernels may have to be recompiled after passes of other
        models.
        """
        self._pass(rows, each)
        taken = self.seconds.setdefault((rows, each), [])
        taken.extend(self._pass(rows, each) for _ in range(4))

    def _pass(self, rows: int, each: int) -> float:
        self._cache.lengths[:rows] = [CONTEXT] * rows
        segments = [Segment(row, CONTEXT, each) for row in range(rows)]
        tokens = torch.randint(0, 4096, (rows * each,))
        begin = time.perf_counter()
        self._model.forward(self._cache, tokens, segments, range(rows * each))
        return time.perf_counter() - begin

    def typical(self, rows: int, each: int) -> float:
        """10th percentile of the pass times, in seconds."""
        return statistics.quantiles(self.seconds[rows, each], n=10)[0]


def load(name: str, quantization: str | None, expand: bool = True) -> PackedModel:
    """Load a model with quantised weights expanded, or packed as torchao produces them."""
    expand_weights = loading.expand_weights
    if not expand:
        loading.expand_weights = lambda model: None
    try:
        cpu = torch.device("cpu")
        return loading.load_model(
            name, "companion", torch.bfloat16, cpu, quantization=quantization
        ).model
    finally:
        loading.expand_weights = expand_weights


@torch.inference_mode()
def passes(draft: str, companions: list[str], seconds: float, console: Console) -> None:
    """Time passes: parts 1 and 2."""
    timed = {"plain": Passes(load(draft, None))}
    for bits in ("int8", "int4"):
        timed[f"{bits}, expanded"] = Passes(load(draft, bits))
        timed[f"{bits}, packed"] = Passes(load(draft, bits, expand=False))
    for name in companions:
        timed[name] = Passes(load(name, None))
    # Shapes of part 1, and of one draft pass and one companion pass of part 2.
    shapes = [(1, 1), (8, 1), (32, 1), (32, 5), (1, 5), (8, 5)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for shape in shapes:
            for each in timed.values():
                each.time(*shape)

    table = Table(title=f"time of a pass of {draft}, bfloat16, × plain")
    for heading in ("", "1 token", "8 tokens", "32 tokens", "160 tokens"):
        table.add_column(heading, justify="right" if heading else "left")
    plain = timed["plain"]
    for name, each in timed.items():
        if name not in companions:
            ratios = [each.typical(*shape) / plain.typical(*shape) for shape in shapes[:4]]
            table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    table = Table(title="time of a companion's pass over 5 drafted tokens, × 5 draft passes")
    for heading in ("", "batch 1", "batch 8", "batch 32"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("int8, expanded", "int4, expanded", *companions):
        ratios = [timed[name].typical(b, 5) / (5 * plain.typical(b, 1)) for b in (1, 8, 32)]
        table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)
    console.print(f"{len(plain.seconds[1, 1])} passes per model and shape")


def information(arguments: argparse.Namespace, console: Console) -> None:
    """Measure the information gain: part 3."""
    llm = LLM(arguments.target, None, dtype="bfloat16", max_batch_size=16)
    prompts = [
        llm.tokenize([{"role": "user", "content": text}])
        for text in load_prompts(arguments.prompts, arguments.num_prompts)
    ]
    sampling = SamplingParams(max_tokens=arguments.max_tokens, seed=0)
    table = Table(title=f"{arguments.num_prompts} prompts of {arguments.prompts.name}")
    for heading in ("", "mean S", "r(A, acceptance)", "bits from S, A", "of H(X)"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("draft:int8", "draft:int4", *arguments.companions):
        models = llm.load_models(SpeculationConfig(arguments.draft, companion=name, policy="fixed"))
        records = collect(
            Models(models.target, models.draft, models.companion),
            prompts,
            sampling,
            num_speculative_tokens=5,
        ).records
        gain = information_gains(records)["S,A adaptive"]
        weight = records.reach_probability()
        table.add_row(
            name,
            f"{records.overlap.mean():.3f}",
            f"{pearson(records.agreement, records.acceptance, weight):.2f}",
            f"{gain.corrected:.3f}",
            f"{gain.entropy:.3f}",
        )
    console.print(table)
    console.print(f"{len(records)} drafted tokens, temperature 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companions", nargs="*", default=["zoo:companion"])
    parser.add_argument("--passes", type=float, metavar="SECONDS", help="time passes for this long")
    parser.add_argument("--prompts", type=Path, help="measure information on these")
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(width=110)
    if arguments.passes:
        passes(arguments.draft, arguments.companions, arguments.passes, console)
    if arguments.prompts:
        information(arguments, console)


if __name__ == "__main__":
    main()
