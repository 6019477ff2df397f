"""Weights stored in bfloat16, losslessly in 12 bits, and quantised to 8 bits: interleaved passes.

    python benchmarks/narrow_weights.py --output benchmarks/results/narrow_weights.json

All three are loaded in one process, and their passes directly follow one another, so that other
load affects all equally. Prints the median ratio of the time to that of 16 bits, its standard
error, and the minimum time of each. The logits of 12 bits must equal those of 16 bits bitwise.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from turns import pass_turns, ratio_of_turns

from draftwise import LLM, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.engine.assembly import Models
from draftwise.kernels.native import suitability
from draftwise.models.packed_model import Segment
from draftwise.profiling.passes import PassShape, PassTimer, Stage

SIZES = ((1, 1), (1, 8), (8, 8), (8, 32), (8, 48), (16, 64), (32, 32), (32, 96), (32, 192))
BITS = (16, 12, 8)


def load(target: str, bits: int, capacity: int) -> Models:
    """Load a target whose weights are stored in ``bits`` bits."""
    name = f"{target}:int8" if bits == 8 else target
    with patch.object(suitability, "are_compressible", lambda *_: bits == 12):
        llm = LLM(name, None, dtype="bfloat16", max_batch_size=32, max_model_len=capacity)
        models = llm.load_models(SpeculationConfig("zoo:draft", policy="none"))
    native: Any = models.target.model.native
    if native is None or native.bits != bits:
        raise SystemExit(f"{name} cannot run from weights of {bits} bits on this machine")
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    models = {bits: load(arguments.target, bits, arguments.context + 64) for bits in BITS}
    tokens = [1, 2, 3]
    logits = {
        bits: each.target.model.forward(
            each.target.model.new_cache(1, 8), tokens, [Segment(0, 0, 3)], range(3)
        )
        for bits, each in models.items()
    }
    if not torch.equal(logits[16], logits[12]):
        raise SystemExit("the logits of 12 bits differ from those of 16 bits")
    timers = {bits: PassTimer(each, 32, arguments.context + 16, 7) for bits, each in models.items()}
    shapes = [PassShape(*size, arguments.context) for size in SIZES]
    timed = {bits: partial(timer, Stage.TARGET) for bits, timer in timers.items()}
    seconds = pass_turns(timed, shapes, arguments.turns)
    table = Table("requests", "tokens", *(f"{bits} bits, ms" for bits in BITS), "12 / 16", "8 / 16")
    rows = []
    for shape in shapes:
        row: dict[str, Any] = {"requests": shape.num_requests, "tokens": shape.num_tokens}
        row |= {f"shortest_ms_{bits}": 1e3 * min(seconds[shape, bits]) for bits in BITS}
        ratios = []
        for bits in (12, 8):
            ratio, error = ratio_of_turns(seconds[shape, 16], seconds[shape, bits])
            row |= {f"ratio_{bits}": ratio, f"error_{bits}": error}
            ratios.append(f"{ratio:.3f} ± {error:.3f}")
        shortest = [f"{row[f'shortest_ms_{bits}']:.2f}" for bits in BITS]
        table.add_row(str(shape.num_requests), str(shape.num_tokens), *shortest, *ratios)
        rows.append(row)
    Console().print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": rows})


if __name__ == "__main__":
    main()
