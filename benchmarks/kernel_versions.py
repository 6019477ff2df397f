"""Two versions of the kernels on the same weights in one process, interleaved pass by pass.

    git worktree add /tmp/before HEAD~1
    python benchmarks/kernel_versions.py --before /tmp/before/src --after src --contexts 200 1000

The speed of a machine varies with other load, so passes of both versions directly follow one
another. Prints the median ratio of the time after to the time before, its standard error, and the
minimum time of both. Both versions must have the same interface.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwise import LLM, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.turns import median_ratio, time_pairs
from draftwise.kernels.native.compilation import compiled_library
from draftwise.kernels.native.library import NativeLibrary
from draftwise.profiling.passes import PassShape, PassTimer, Stage

SIZES = ((1, 1), (1, 8), (8, 8), (8, 32), (8, 48), (8, 64), (32, 32), (32, 96), (32, 192))


def kernels_of(source: Path) -> NativeLibrary:
    """Compile the kernels of a source tree, or use the cached library."""
    compiled = compiled_library(source / "draftwise/kernels/native/source")
    return NativeLibrary(ctypes.CDLL(str(compiled)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="source tree: a folder src")
    parser.add_argument("--after", type=Path, default=Path("src"))
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[200])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    versions = [kernels_of(arguments.before), kernels_of(arguments.after)]
    longest = max(arguments.contexts)
    llm = LLM(arguments.target, None, max_batch_size=32, max_model_len=longest + 64)
    models = llm.load_models(SpeculationConfig("zoo:draft", policy="none"))
    timer = PassTimer(models, 32, longest + 16, 7)
    decoder: Any = models.target.model.native
    if decoder is None:
        raise SystemExit(f"{arguments.target} does not run on the native kernels on this machine")
    shapes = [PassShape(*size, context) for context in arguments.contexts for size in SIZES]

    def seconds_of(version: int, shape: PassShape) -> float:
        decoder._library = versions[version]
        return timer(Stage.TARGET, shape)

    seconds = time_pairs(shapes, arguments.turns, seconds_of)
    table = Table(title="time of a pass, after / before")
    for column in ("requests", "tokens", "context", "ratio", "±", "before ms", "after ms"):
        table.add_column(column, justify="right")
    results = []
    for shape in shapes:
        before, after = seconds[shape, 0], seconds[shape, 1]
        ratio, error = median_ratio(before, after)
        row = {
            "requests": shape.num_requests,
            "tokens": shape.num_tokens,
            "context": shape.context,
            "ratio": ratio,
            "standard_error": error,
            "shortest_before_ms": 1e3 * min(before),
            "shortest_after_ms": 1e3 * min(after),
        }
        results.append(row)
        shown = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()]
        table.add_row(*shown)
    Console().print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": results})


if __name__ == "__main__":
    main()
