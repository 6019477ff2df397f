"""Whole answers in batches that nobody joins, with and without weights for who ends last.

    python benchmarks/closed_batches.py --target MODEL --prompts gsm8k_test.jsonl qa.jsonl \
        --output results/closed_batches.json

All requests start together, and the time until the last one ends is measured, prompts included.
``adaptive`` weighs an accepted token by what it takes off this end (`policies/token_weights.py`).
``equal weights`` is the same policy with the same worth for all tokens. Ratios are tokens per
second relative to no speculation, with the quartiles over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.contenders import PolicyContender, policy_contenders
from draftwise.benchmark.contest import compete, make_cell, num_identical, ratios
from draftwise.benchmark.figures import spread
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import load_workload
from draftwise.policies.inputs import RequestState
from draftwise.policies.priced import PricedPolicy
from draftwise.policies.token_weights import Floats

WEIGHED, EQUAL = "adaptive", "equal weights"


def equally_weighted(llm: LLM, speculation: SpeculationConfig) -> PolicyContender:
    """``adaptive``, with the same worth for all tokens."""
    contender = PolicyContender(EQUAL, llm.with_speculation(speculation))
    policy = contender.llm.engine.policies.get(None)
    assert isinstance(policy, PricedPolicy)

    def weights(requests: Sequence[RequestState], context: int, uses_offers: bool) -> Floats:
        return np.ones(len(requests))

    policy.token_weights.weights = weights  # type: ignore[method-assign]
    return contender


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", nargs="+", default=["suffix"])
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--longest-prompt", type=int, default=512)
    parser.add_argument("--chat", action="store_true", help="format prompts with the chat template")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--learning-turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    largest = max(arguments.batch_sizes)
    llm = LLM(
        arguments.target,
        dtype="bfloat16",
        max_batch_size=largest,
        max_model_len=arguments.longest_prompt + arguments.max_tokens + 1,
        enable_prefix_caching=False,
    )
    speculation = SpeculationConfig(
        arguments.draft, policy=WEIGHED, num_speculative_tokens=arguments.num_speculative_tokens
    )
    contenders = policy_contenders(llm, [WEIGHED], speculation)
    contenders.append(equally_weighted(contenders[-1].llm, speculation))
    table = Table("workload", "T", "batch", WEIGHED, "quartiles", EQUAL, "quartiles", box=None)
    console, cells = Console(width=100), []
    means: dict[str, list[float]] = defaultdict(list)
    for path in arguments.prompts:
        workload = load_workload(llm, path, largest, arguments.longest_prompt, arguments.chat)
        for temperature in arguments.temperatures:
            params = SamplingParams(
                temperature=temperature,
                top_p=0.95 if temperature else 1.0,
                max_tokens=arguments.max_tokens,
                seed=0,
            )
            for size in arguments.batch_sizes:
                results = compete(
                    make_cell(workload.name, workload.prompts, size, arguments.rounds),
                    contenders,
                    params,
                    arguments.learning_turns,
                )
                row, figures = [], {}
                for name in (WEIGHED, EQUAL):
                    ratio = spread(ratios(results, name))
                    means[name].append(ratio["median"])
                    row += [f"{ratio['median']:.3f}", f"{ratio['low']:.3f}-{ratio['high']:.3f}"]
                    same, _ = num_identical(results, name)
                    figures[name] = {"ratio": ratio, "identical_answers": same}
                cell: dict[str, Any] = {
                    "workload": workload.name,
                    "temperature": temperature,
                    "batch_size": size,
                    "answers": size * arguments.rounds,
                    "contenders": figures,
                }
                cells.append(cell)
                table.add_row(workload.name, f"{temperature:g}", str(size), *row)
                console.print(workload.name, temperature, size, *row)
    console.print(table)
    geometric = {name: statistics.geometric_mean(each) for name, each in means.items()}
    console.print("geometric means:", geometric)
    for contender in contenders:
        contender.close()
    if arguments.output:
        write_report(
            arguments.output, vars(arguments), {"cells": cells, "geometric_means": geometric}
        )


if __name__ == "__main__":
    main()
