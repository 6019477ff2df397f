"""Step time as a function of context, batch size and verified tokens, compared with the roofline.

    python benchmarks/growth.py --output growth.json --figures docs/figures

The roofline is the larger of two times. The first is reading the stored weights once and the keys
and values of every request, at the bandwidth of a plain memory read. The second is the matrix
products, at the speed of a large matrix product. Both speeds are measured interleaved with the
passes. Start-up is measured in a separate process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from stored_weights import stored_bytes

from draftwise.benchmark.report import write_report
from draftwise.benchmark.turns import time_calls
from draftwise.kernels.native.library import kernel_in_use
from draftwise.models.loading import LoadedModel, load_model
from draftwise.models.segment import Segment

matplotlib.use("Agg")

CONTEXTS = (128, 256, 512, 1024, 2000)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
GAMMAS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
READ_BYTES = 400 * 2**20
PRODUCT_ROWS, PRODUCT_SIZE = 1024, 2048
CPU = torch.device("cpu")

START_UP = """
import resource, sys, time
start = time.perf_counter()
from draftwise import LLM, SamplingParams, SpeculationConfig
imported = time.perf_counter()
speculation = SpeculationConfig(draft=sys.argv[2]) if len(sys.argv) > 2 else None
llm = LLM(sys.argv[1], speculation, dtype="bfloat16", max_batch_size=8)
loaded = time.perf_counter()
llm.generate(["Question: "], SamplingParams(max_tokens=1))
first = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(imported - start, loaded - imported, first - loaded, peak)
"""


class Machine:
    """Reference operations for memory bandwidth and matrix products, timed in every turn."""

    def __init__(self) -> None:
        self._memory = torch.zeros(READ_BYTES // 4)
        self._rows = torch.randn(PRODUCT_ROWS, PRODUCT_SIZE).bfloat16()
        self._weight = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).bfloat16()

    def read(self) -> None:
        self._memory.sum()

    def multiply(self) -> None:
        torch.nn.functional.linear(self._rows, self._weight)


def measure(
    model: LoadedModel, machine: Machine, shape: tuple[int, int, int], repeats: int
) -> dict[str, Any]:
    """Time a pass of ``batch`` requests with ``tokens`` new tokens after ``context`` tokens."""
    batch, tokens, context = shape
    cache = model.model.new_cache(batch, context + tokens)
    ids = torch.arange(batch * tokens).remainder(model.model.vocab_size).tolist()
    segments = [Segment(row, context, tokens) for row in range(batch)]
    times = time_calls(
        {
            "pass": lambda: model.model.forward(cache, ids, segments, range(batch * tokens)),
            "read": machine.read,
            "multiply": machine.multiply,
        },
        repeats,
    )
    seconds = {name: statistics.median(turns) / 1e3 for name, turns in times.items()}
    read = READ_BYTES / seconds["read"]
    multiplied = PRODUCT_ROWS * PRODUCT_SIZE**2 / seconds["multiply"]
    cached = batch * (context + tokens) * cache.bytes_per_token
    bound_by_memory = (stored_bytes(model) + cached) / read
    bound_by_products = batch * tokens * model.num_parameters / multiplied
    return {
        "batch_size": batch,
        "tokens_each": tokens,
        "context": context,
        "ms": round(seconds["pass"] * 1e3, 3),
        "roofline_ms": round(max(bound_by_memory, bound_by_products) * 1e3, 3),
    }


def start_up(target: str, draft: str | None) -> dict[str, float]:
    """Start-up times in seconds and peak memory in GiB of a new process."""
    names = [target] if draft is None else [target, draft]
    done = subprocess.run(
        [sys.executable, "-c", START_UP, *names], capture_output=True, text=True, check=True
    )
    imports, load, first, peak = map(float, done.stdout.split())
    return {
        "import_s": round(imports, 2),
        "load_s": round(load, 2),
        "first_token_s": round(first, 2),
        "peak_gib": round(peak, 2),
    }


def draw(rows: list[dict[str, Any]], along: str, label: str, title: str, path: Path) -> None:
    style: Any = {"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
        at = [row[along] for row in rows]
        axes.plot(at, [r["ms"] for r in rows], "o-", color="#0072B2", label="measured")
        axes.plot(at, [r["roofline_ms"] for r in rows], "s--", color="#D55E00", label="roofline")
        axes.set_xlabel(label)
        axes.set_ylabel("target pass, ms")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--figures", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.target, "target", torch.bfloat16, CPU)
    machine = Machine()
    context = CONTEXTS[0]
    shapes = {
        "context": [(1, 1, length) for length in CONTEXTS],
        "context_8": [(8, 4, length) for length in CONTEXTS],
        "batch": [(batch, 1, context) for batch in BATCH_SIZES],
        "gamma_1": [(1, gamma + 1, context) for gamma in GAMMAS],
        "gamma_8": [(8, gamma + 1, context) for gamma in GAMMAS],
    }
    figures: dict[str, Any] = {}
    for name, every in shapes.items():
        figures[name] = [measure(model, machine, shape, arguments.repeats) for shape in every]
        for row in figures[name]:
            print(name, *(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
    figures["start_up"] = {
        "target": start_up(arguments.target, None),
        "target and draft": start_up(arguments.target, arguments.draft),
    }
    print(figures["start_up"])
    write_report(arguments.output, vars(arguments), figures | {"kernels": kernel_in_use()})
    arguments.figures.mkdir(parents=True, exist_ok=True)
    for name, along, label, title in (
        ("context", "context", "tokens of context", "one request, one token"),
        ("context_8", "context", "tokens of context", "8 requests, 4 tokens each"),
        ("batch", "batch_size", "requests", "one token each, context 128"),
        ("gamma_1", "tokens_each", "verified tokens, γ + 1", "one request, context 128"),
        ("gamma_8", "tokens_each", "verified tokens each, γ + 1", "8 requests, context 128"),
    ):
        draw(figures[name], along, label, title, arguments.figures / f"growth_{name}.svg")


if __name__ == "__main__":
    main()
