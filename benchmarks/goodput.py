"""Goodput of all policies over batch sizes, in one interleaved run.

    python benchmarks/goodput.py --prompts gsm8k_test.jsonl humaneval.jsonl spec_bench.jsonl \
        --companion zoo:companion --output goodput.json

Every policy has its own engine on the same loaded weights. An engine is kept full: when a request
ends, the next prompt is added, and the first requests end at staggered times. The engines take
turns of a fraction of a second, in an order that is shuffled every round, so that disturbances of
the machine affect all policies equally. Only steps in which the whole batch generates and no prompt
is processed are counted. Goodput is the number of tokens gained in these steps divided by their
wall time. Policies that learn run some steps at every batch size before counting starts. The steps
of an oracle are replayed without it, and its tokens are divided by the time of the replay.

Policies of token trees name their nodes and their width, as ``adaptive:16x4``.

For each workload and batch size, the report has goodput relative to no speculation with the
standard error over rounds, the best static draft length in hindsight, and each policy's goodput
relative to the oracle's. Small batch sizes have more rounds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.contenders import Setting
from draftwise.benchmark.report import write_report
from draftwise.benchmark.sustained import (
    BatchContender,
    batch_contenders,
    begin,
    best_static,
    best_static_unbiased,
    compete,
    num_rounds,
    summary,
)
from draftwise.benchmark.workload import load_workload
from draftwise.errors import InvalidParameterError

STATIC = (1, 2, 3, 5, 7)
ALL_PROMPTS = 1_000_000
GOLDEN_RATIO = 0.618034


def contenders(llm: LLM, arguments: argparse.Namespace) -> list[BatchContender]:
    """Contenders for each static draft length, and for each policy and maximum draft length."""
    settings = {"none": "none"} | {f"fixed {n}": f"fixed:{n}" for n in arguments.static}
    for text in arguments.policies:
        policy, given, width, draft = Setting.parse(text)
        if draft is not None:
            raise InvalidParameterError("policies", f"{text}: the draft is that of --draft")
        for gamma in arguments.num_speculative_tokens if given is None else [given]:
            shape = f"{gamma}" if width is None else f"{gamma}x{width}"
            settings[f"{policy} ≤{shape}"] = f"{policy}:{shape}"
    result = []
    for name, setting in settings.items():
        is_staged = Setting.parse(setting).policy == "staged"
        companion = arguments.mid if is_staged else arguments.companion
        config = SpeculationConfig(
            draft=arguments.draft,
            companion=None if companion == "none" else companion,
            profile=arguments.profile,
            # The latency profile does not include the middle model, and ``staged`` needs none.
            latency_profile=None if is_staged else arguments.latency_profile,
        )
        result += batch_contenders(llm, setting, config, name)
    for each in result:
        each.static = " ≤" not in each.name
    return result


def evenly_spread(prompts: list[list[int]]) -> list[list[int]]:
    """Order prompts so that any few consecutive ones have about the mean length of all.

    Contenders process different prompts at the same time, so lengths should not vary along the
    order.
    """
    places = sorted(range(len(prompts)), key=lambda place: place * GOLDEN_RATIO % 1)
    order = dict(zip(places, sorted(prompts, key=len), strict=True))
    return [order[place] for place in range(len(prompts))]


def show(console: Console, title: str, figures: dict[str, Any]) -> None:
    best = best_static(figures)
    best_ratio = figures[best]["ratio"]
    oracles = [f["ratio"] for name, f in figures.items() if name.startswith("oracle")]
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "× none": lambda f: f"{f['ratio']:.3f}",
        "±": lambda f: f"{f['standard_error']:.3f}",
        "× best static": lambda f: f"{f['ratio'] / best_ratio:.3f}",
        "of oracle": lambda f: f"{f['ratio'] / max(oracles):.2f}" if oracles else "",
        "tokens": lambda f: f"{f['tokens_per_request_step']:.2f}",
        "drafted": lambda f: f"{f['drafted_per_request_step']:.2f}",
        "verified": lambda f: f"{f['verified_per_request_step']:.2f}",
        "accepted": lambda f: f"{f['acceptance_rate']:.2f}",
        "select": lambda f: f"{f['share_of_time']['select']:.1%}",
        "context": lambda f: f"{f['context_per_request']:.0f}",
        "step ms": lambda f: f"{f['step_ms']:.1f}",
    }
    unbiased = best_static_unbiased(figures)
    table = Table(
        title=f"{title}: best static {best} {best_ratio:.3f}, cross-validated {unbiased:.3f}"
    )
    for head in ("policy", *columns):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for name, own in figures.items():
        table.add_row(name, *(text(own) for text in columns.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft", help="drafts, separated by commas")
    parser.add_argument("--companion", default="zoo:companion", help="a model, or none")
    parser.add_argument(
        "--mid", default="zoo:companion", help="the middle model of staged speculation"
    )
    parser.add_argument("--profile", help="acceptance profile of the triple")
    parser.add_argument("--latency-profile", help="latency profile of the machine")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=64, help="sampled from each file")
    parser.add_argument(
        "--longest-prompt", type=int, default=256, help="maximum number of prompt tokens"
    )
    parser.add_argument("--plain", action="store_true", help="without the chat template")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--stop-at-eos", action="store_true", help="answers may end by themselves")
    parser.add_argument(
        "--sampling",
        nargs="+",
        default=["1"],
        help="temperatures, with an optional top-p: 1 0.8:0.95",
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["adaptive", "sv", "oracle"],
        help="policies, with an optional maximum draft length, or nodes and width of token trees: "
        "sv sv:7 adaptive:16x4",
    )
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[5])
    parser.add_argument("--static", type=int, nargs="*", default=list(STATIC))
    parser.add_argument("--turn", type=float, default=0.5, help="seconds counted per turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-up-steps", type=int, default=150, help="for policies that learn")
    parser.add_argument("--first-steps", type=int, default=20, help="for the other policies")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(width=120)
    llm = LLM(
        arguments.target,
        SpeculationConfig(arguments.draft, policy="none"),
        dtype="bfloat16",
        max_batch_size=max(arguments.batch_sizes),
        max_model_len=arguments.longest_prompt + arguments.max_tokens + 8,
        enable_prefix_caching=False,
    )
    started = time.strftime("%Y-%m-%d")
    results: dict[str, Any] = {}
    all_contenders = contenders(llm, arguments)
    for sampling in arguments.sampling:
        temperature, _, top_p = sampling.partition(":")
        params = SamplingParams(
            max_tokens=arguments.max_tokens,
            temperature=float(temperature),
            top_p=float(top_p or 1.0),
        )
        for path in arguments.prompts:
            # Files are ordered by task, so shuffle before taking a part of the prompts.
            prompts = load_workload(
                llm, path, ALL_PROMPTS, arguments.longest_prompt, chat=not arguments.plain
            ).prompts
            random.Random(0).shuffle(prompts)
            prompts = evenly_spread(prompts[: arguments.num_prompts])
            for batch_size in arguments.batch_sizes:
                title = f"{path.stem}, temperature {sampling}, batch {batch_size}"
                begin(
                    all_contenders,
                    prompts,
                    params,
                    batch_size,
                    stop_at_eos=arguments.stop_at_eos,
                )
                with Progress(console=console, transient=True) as bar:
                    task = bar.add_task(
                        title,
                        total=len(all_contenders) * (1 + num_rounds(arguments.rounds, batch_size)),
                    )
                    compete(
                        all_contenders,
                        arguments.rounds,
                        arguments.turn,
                        arguments.warm_up_steps,
                        arguments.first_steps,
                        lambda b=bar, t=task: b.advance(t),
                    )
                figures = summary(all_contenders)
                show(console, title, figures)
                of_workload = results.setdefault(sampling, {}).setdefault(path.stem, {})
                of_workload[str(batch_size)] = figures
                if arguments.output:
                    so_far = {"started": started, "results": results}
                    write_report(arguments.output, vars(arguments), so_far)


if __name__ == "__main__":
    main()
