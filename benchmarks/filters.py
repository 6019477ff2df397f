"""Time of top-k and top-p in the native kernels and by sorting in PyTorch.

Rows of random logits at temperature 0.8, interleaved, one thread. "ratio" is the kernels' time over
PyTorch's. "filter" is the additional time over the kernels' plain softmax.

    python benchmarks/filters.py --vocab 4096 32000 128000
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftwise.benchmark.report import write_report
from draftwise.core.sampling import LogitControls, probabilities
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.sampling import distributions

ROWS = 8
FILTERS: tuple[tuple[int | None, float | None], ...] = ((None, 0.95), (50, None), (50, 0.95))


def controls(top_k: int | None, top_p: float | None) -> LogitControls:
    return LogitControls(
        torch.full((1,), 0.8),
        all_greedy=False,
        any_greedy=False,
        top_k=None if top_k is None else torch.full((1,), top_k),
        top_p=None if top_p is None else torch.full((1,), top_p),
    )


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) / ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32000, 128000])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    library = native_library()
    if library is None:
        parser.error("the native kernels are not available on this machine")
    console, table = Console(width=100), Table()
    for name in ("vocabulary", "top-k", "top-p", "ratio", "kernels, µs per row", "filter, µs"):
        table.add_column(name, justify="right")
    owner = torch.zeros(ROWS, dtype=torch.long)
    results: list[dict[str, Any]] = []
    for vocab in arguments.vocab:
        logits = 3 * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0))
        for top_k, top_p in FILTERS:
            filtering, plain = controls(top_k, top_p), controls(None, None)
            every = filtering.rows(owner)
            contest: dict[str, Callable[[], Any]] = {
                "kernels": lambda c=filtering, x=logits: distributions(library, x, c, owner),
                "plain": lambda c=plain, x=logits: distributions(library, x, c, owner),
                "pytorch": lambda c=every, x=logits: probabilities(x, c),
            }
            times: dict[str, list[float]] = {name: [] for name in contest}
            for _ in range(arguments.repeats):
                for name, function in contest.items():
                    times[name].append(seconds(function))
            median = {name: statistics.median(values) for name, values in times.items()}
            figures = {
                "vocab": vocab,
                "top_k": top_k,
                "top_p": top_p,
                "share": median["kernels"] / median["pytorch"],
                "kernel_us": 1e6 * median["kernels"],
                "filter_us": 1e6 * (median["kernels"] - median["plain"]),
            }
            results.append(figures)
            table.add_row(
                str(vocab),
                str(top_k or ""),
                str(top_p or ""),
                f"{figures['share']:.3f}",
                f"{figures['kernel_us']:.0f}",
                f"{figures['filter_us']:.0f}",
            )
    console.print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": results})


if __name__ == "__main__":
    main()
