"""What recurrent layers cost in a step of a random hybrid, and what verification costs.

    python benchmarks/recurrent.py --output recurrent.json

The model has the shape of Qwen3.5-0.8B with random weights. Each turn measures a pass of one token,
of eight tokens of which one is accepted, and the time within recurrences and convolutions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from draftwise.benchmark.report import write_report
from draftwise.models.pretrained import PretrainedModel
from draftwise.models.recurrent.computation import RecurrentPass
from draftwise.models.segment import Segment

SHAPE = {
    "vocab_size": 65_536,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
}


class Clock:
    """Time spent in a method."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self._own = 0.0, getattr(owner, name)
        setattr(owner, name, lambda *args, **options: self._timed(*args, **options))

    def _timed(self, *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = self._own(*args, **options)
        self.seconds += time.perf_counter() - begin
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**SHAPE)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = PretrainedModel(module, "target", 4096)
    clocks = {name: Clock(RecurrentPass, name) for name in ("recur", "convolve")}
    rows = []
    for size in arguments.batch_sizes:
        cache = model.new_cache(size, 512, 64)
        tokens = list(range(arguments.context))
        segments = [Segment(slot, 0, len(tokens)) for slot in range(size)]
        model.forward(cache, tokens * size, segments, None)
        for slot in range(size):
            cache.truncate(slot, len(tokens))
        times: dict[int, list[dict[str, float]]] = {1: [], 8: []}
        for _ in range(arguments.turns):
            for count in times:
                starts = list(cache.lengths)
                segments = [Segment(slot, starts[slot], count) for slot in range(size)]
                for clock in clocks.values():
                    clock.seconds = 0.0
                begin = time.perf_counter()
                model.forward(cache, list(range(count)) * size, segments, range(count * size))
                parts = {"pass": time.perf_counter() - begin}
                parts |= {name: clock.seconds for name, clock in clocks.items()}
                times[count].append(parts)
                for slot in range(size):
                    cache.truncate(slot, starts[slot] + 1)
        for count, turns in times.items():
            row: dict[str, Any] = {"batch_size": size, "tokens": count}
            for name in turns[0]:
                row[name] = statistics.median(turn[name] for turn in turns)
            row["share"] = (row["recur"] + row["convolve"]) / row["pass"]
            print(row, flush=True)
            rows.append(row)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": rows})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
