"""Fairness between requests of policies that select tokens over the whole batch.

    python benchmarks/fairness.py --prompts gsm8k_test.jsonl spec_bench.jsonl --num-prompts 1024 \
        --output benchmarks/results/fairness.json

Runs many prompts at a large batch size. Reports the distribution over requests of the verified
tokens per step (mean, median, five lowest, five highest), and the minimum number of tokens that a
request gained per step, which is at least one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import chat_prompts
from draftwise.policies import policy_class
from draftwise.studies.fairness import shares_of_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--policies", nargs="+", default=["sv"])
    parser.add_argument("--profile")
    parser.add_argument("--latency-profile")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=1024, help="total over all files")
    parser.add_argument("--longest-prompt", type=int, default=200, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    console = Console(width=110)
    llm = LLM(
        arguments.target,
        dtype="bfloat16",
        max_batch_size=arguments.batch_size,
        max_model_len=arguments.longest_prompt + arguments.max_tokens + 8,
    )
    prompts = chat_prompts(llm, arguments.prompts, arguments.num_prompts, arguments.longest_prompt)[
        : arguments.num_prompts
    ]
    params = [
        SamplingParams(max_tokens=arguments.max_tokens, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    table = Table(title=f"{len(prompts)} prompts at batch {arguments.batch_size}")
    for name in ("policy", "verified per step", "median", "lowest", "highest", "min. gained"):
        table.add_column(name)
    results: dict[str, Any] = {}
    for policy in arguments.policies:
        uses_companion = policy_class(policy).uses_companion()
        speculating = llm.with_speculation(
            SpeculationConfig(
                arguments.draft,
                companion=arguments.companion if uses_companion else None,
                policy=policy,
                num_speculative_tokens=arguments.num_speculative_tokens,
                profile=arguments.profile,
                latency_profile=arguments.latency_profile,
            )
        )
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(policy, total=len(prompts))
            own = shares_of_requests(
                speculating,
                prompts,
                params,
                lambda requests, b=bar, t=task: b.advance(
                    t, sum(r.finish_reason is not None for r in requests)
                ),
            )
        results[policy] = own
        table.add_row(
            policy,
            f"{own['mean']:.2f}",
            f"{own['median']:.2f}",
            " ".join(f"{v:.2f}" for v in own["lowest"]),
            " ".join(f"{v:.2f}" for v in own["highest"]),
            f"{own['fewest_tokens_per_step']:.2f}",
        )
    console.print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": results})


if __name__ == "__main__":
    main()
