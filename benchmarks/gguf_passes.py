"""Passes of a GGUF file in Draftwise and in llama.cpp, in turns on the same machine.

    python benchmarks/gguf_passes.py --model FILE.gguf --llama PYTHON --output gguf_passes.json

A pass computes some tokens of one request after a context, and the logits of each, as the
verification of a draft does. A prompt has no context, and the logits of its last token only. PYTHON
is the interpreter of an environment with ``llama-cpp-python``. The share of the memory's speed is
that of a pass over one token: the bytes that it reads per second, relative to a plain read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftwise import LLM
from draftwise.benchmark.report import write_report
from draftwise.benchmark.turns import median_ratio, time_pairs
from draftwise.models.segment import Segment

CONTEXT, TOKENS, PROMPTS = 160, (1, 2, 4, 8, 16, 32), (512, 2048)
READ_BYTES = 2**29

# Executed by the other environment: a line per pass in and out.
_LLAMA = """
import json, sys, time
import llama_cpp as llama

wanted = json.loads(sys.stdin.readline())
options = llama.llama_model_default_params()
options.n_gpu_layers = 0
began = time.perf_counter()
model = llama.llama_model_load_from_file(wanted["model"].encode(), options)
limits = llama.llama_context_default_params()
limits.n_ctx, limits.n_batch, limits.n_ubatch = 4096, 2048, 512
limits.n_threads = limits.n_threads_batch = wanted["threads"]
context = llama.llama_init_from_model(model, limits)
loaded = time.perf_counter() - began
memory = llama.llama_get_memory(context)
batch = llama.llama_batch_init(2048, 0, 1)

def decode(start, count, all_logits):
    batch.n_tokens = count
    for at in range(count):
        batch.token[at], batch.pos[at] = 100 + at, start + at
        batch.logits[at] = all_logits or at + 1 == count
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    began = time.perf_counter()
    assert llama.llama_decode(context, batch) == 0
    llama.llama_get_logits(context)
    return time.perf_counter() - began

from importlib.metadata import version
print(json.dumps({
    "version": version("llama-cpp-python"),
    "system": llama.llama_print_system_info().decode(),
    "load_s": loaded,
}), flush=True)
for line in sys.stdin:
    start, count = json.loads(line)
    llama.llama_memory_clear(memory, True)
    if start:
        decode(0, start, False)
    print(decode(start, count, bool(start)), flush=True)
"""


class Ours:
    """Passes of Draftwise."""

    def __init__(self, path: Path) -> None:
        began = time.perf_counter()
        self.llm = LLM(str(path), max_batch_size=1, max_model_len=4096)
        self.load_s = time.perf_counter() - began
        self._model = self.llm.target.model
        self._cache = self._model.new_cache(1, 4096)

    def __call__(self, start: int, count: int) -> float:
        if start:
            self._decode(0, start, [start - 1])
        return self._decode(start, count, list(range(count)) if start else [count - 1])

    def _decode(self, start: int, count: int, rows: list[int]) -> float:
        tokens = torch.arange(100, 100 + count)
        began = time.perf_counter()
        self._model.forward(self._cache, tokens, [Segment(0, start, count)], rows)
        return time.perf_counter() - began


class Theirs:
    """Passes of llama.cpp, in a process of its own."""

    def __init__(self, python: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [python, "-c", _LLAMA],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        settings = {"model": str(path), "threads": torch.get_num_threads()}
        self.about: dict[str, Any] = json.loads(self._answer(settings))

    def __call__(self, start: int, count: int) -> float:
        return float(self._answer([start, count]))

    def _answer(self, question: Any) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp ended")
        return line


def read_gb_per_s() -> float:
    """Speed of reading memory with all threads, the fastest of some turns."""
    numbers = torch.ones(READ_BYTES // 4)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - began)
    return READ_BYTES / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--llama", required=True, help="interpreter with llama-cpp-python")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    ours, theirs = Ours(arguments.model), Theirs(arguments.llama, arguments.model)
    shapes = [(CONTEXT, count) for count in TOKENS] + [(0, count) for count in PROMPTS]
    reads = [read_gb_per_s()]
    seconds = time_pairs(
        shapes, arguments.turns, lambda engine, shape: (ours, theirs)[engine](*shape)
    )
    reads.append(read_gb_per_s())
    table = Table(title=f"ms of a pass of {arguments.model.name}")
    for column in ("context", "tokens", "Draftwise", "llama.cpp", "ratio", "±"):
        table.add_column(column, justify="right")
    rows = []
    for shape in shapes:
        mine, other = seconds[shape, 0], seconds[shape, 1]
        ratio, error = median_ratio(mine, other)
        row = {
            "context": shape[0],
            "tokens": shape[1],
            "draftwise_ms": 1e3 * statistics.median(mine),
            "llamacpp_ms": 1e3 * statistics.median(other),
            "speed_over_llamacpp": ratio,
            "standard_error": error,
        }
        rows.append(row)
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    weight_bytes = ours.llm.target.model.native.weight_bytes
    share = weight_bytes / rows[0]["draftwise_ms"] / 1e6 / max(reads)
    Console().print(table)
    print(f"load: {ours.load_s:.1f} s and {theirs.about['load_s']:.1f} s")
    print(f"one token reads {weight_bytes / 1e6:.0f} MB, {share:.2f} of a plain read's speed")
    if arguments.output:
        facts = {
            "llamacpp": theirs.about,
            "load_s": ours.load_s,
            "read_gb_per_s": reads,
            "share_of_read": share,
            "passes": rows,
        }
        write_report(arguments.output, vars(arguments), facts)


if __name__ == "__main__":
    main()
