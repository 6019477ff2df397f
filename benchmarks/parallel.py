"""Overlapped and data-parallel drafting compared with sequential drafting, interleaved.

    python benchmarks/parallel.py --prompts gsm8k_test.jsonl --output parallel.json

Each mode answers the same prompts with a fixed draft length. The report has tokens per second
relative to sequential drafting (median over turns), and the slowdown of target and draft passes
when both run at the same time.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.turns import ratios_of_turns, time_calls
from draftwise.benchmark.workload import chat_prompts
from draftwise.profiling.interference import measure_interference
from draftwise.profiling.passes import PassTimer

MODES: dict[str, dict[str, Any]] = {
    "one after the other": {"overlap": False},
    "overlap": {"overlap": True},
    "two replicas": {"overlap": False, "draft_replicas": 2},
}
CONTEXT = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    largest = max(arguments.batch_sizes)
    speculation = SpeculationConfig(
        arguments.draft,
        policy="fixed",
        num_speculative_tokens=arguments.num_speculative_tokens,
    )
    engines = {
        name: LLM(
            arguments.target,
            speculation,
            dtype="bfloat16",
            max_batch_size=largest,
            max_model_len=2 * CONTEXT + arguments.max_tokens,
            enable_prefix_caching=False,
            **options,
        )
        for name, options in MODES.items()
    }
    plain = engines["one after the other"]
    prompts = chat_prompts(plain, arguments.prompts, largest, CONTEXT)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0, ignore_eos=True)
    console, results = Console(width=100), {}
    table = Table(title="tokens per second, × one after the other")
    for name in ("batch", *MODES):
        table.add_column(name, justify="right")
    for batch_size in arguments.batch_sizes:
        runs = {
            name: (lambda llm=llm, n=batch_size: llm.generate(prompts[:n], params))
            for name, llm in engines.items()
        }
        times = time_calls(runs, arguments.turns, num_untimed=1)
        base = times["one after the other"]
        ratios = {name: ratios_of_turns(base, own) for name, own in times.items()}
        results[str(batch_size)] = ratios
        table.add_row(str(batch_size), *(f"{statistics.median(r):.2f}" for r in ratios.values()))
    console.print(table)
    timer = PassTimer(
        plain.load_models(speculation), largest, CONTEXT, arguments.num_speculative_tokens
    )
    tokens_each = arguments.num_speculative_tokens + 1
    interference = {
        str(size): {
            stage.value: factor
            for stage, factor in measure_interference(timer, [size], tokens_each, CONTEXT).items()
        }
        for size in arguments.batch_sizes
    }
    console.print("slowdown when both run at the same time:", interference)
    for llm in engines.values():
        llm.close()
    if arguments.output:
        figures = {"ratios": results, "interference": interference}
        write_report(arguments.output, vars(arguments), figures)


if __name__ == "__main__":
    main()
