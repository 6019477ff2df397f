"""How much there is to gain by knowing: the oracle over the best static draft length.

    python benchmarks/room.py --prompts gsm8k_test.jsonl humaneval.jsonl spec_bench.jsonl \
        --output benchmarks/results/room.json

Plain speculative decoding gives, for every drafted token, the probability that the target accepts
it; a latency profile of this machine gives what passes cost. From both: the goodput of every
static draft length, and of an oracle that knows the acceptance of all tokens of the draft before it
drafts them and chooses, for the whole batch, the drafts and verifications that gain most per
second. A policy's share of this room is what its estimates are worth. Token-by-token verification;
no prompts; the oracle's knowledge is free.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import chat_prompts
from draftwise.core.latency import LatencyModel
from draftwise.profiling.acceptance import collect
from draftwise.profiling.latency import load_latency, measure_latency

STATIC = (0, 1, 2, 3, 5, 7)
CONTEXT = 150
NUM_STEPS = 400


def reach_of_chains(records: Any, length: int) -> np.ndarray:
    """``[chains, length]`` probability that a draft's tokens up to each are all kept."""
    whole = [
        chain
        for chain in np.split(records.acceptance, np.flatnonzero(np.diff(records.chain)) + 1)
        if len(chain) >= length
    ]
    return np.cumprod(np.stack([chain[:length] for chain in whole]), axis=1)


def static_goodput(reach: np.ndarray, batch: int, length: int, latency: LatencyModel) -> float:
    seconds = latency.target_seconds(batch * (1 + length), batch * CONTEXT)
    seconds += length * latency.draft_seconds(batch)
    return batch * (1 + float(reach[:, :length].sum(axis=1).mean())) / seconds


def oracle_goodput(
    reach: np.ndarray, batch: int, longest: int, latency: LatencyModel, start: float
) -> float:
    """The best ratio of expected tokens to time, by Dinkelbach's iteration."""
    goodput = start
    draft = [0.0, *(latency.draft_seconds(k) for k in range(1, batch + 1))]
    target = [latency.target_seconds(n, batch * CONTEXT) for n in range(batch * (longest + 1) + 1)]
    for _ in range(3):
        generator = np.random.default_rng(0)
        tokens = seconds = 0.0
        for _ in range(NUM_STEPS):
            rows = reach[generator.integers(0, len(reach), batch), :longest]
            best = (-np.inf, 0.0, 0.0)
            for threshold in (2.0, *np.quantile(rows, np.linspace(0, 1, 25))):
                chosen = rows >= threshold
                depth = chosen.sum(axis=0)  # rows fall, so these are prefixes
                gained = batch + float((rows * chosen).sum())
                spent = target[batch + int(depth.sum())] + sum(draft[int(k)] for k in depth)
                best = max(best, (gained - goodput * spent, gained, spent))
            tokens += best[1]
            seconds += best[2]
        goodput = tokens / seconds
    return goodput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--drafts", nargs="+", default=["zoo:draft", "zoo:mid", "zoo:companion"])
    parser.add_argument("--same-target", default="zoo:target", help="small, with the same logits")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=40, help="of each file")
    parser.add_argument("--longest-prompt", type=int, default=300, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--longest-draft", type=int, default=7)
    parser.add_argument("--latency-profile")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    console = Console(width=110)
    results: dict[str, Any] = {}
    for draft in arguments.drafts:
        speculation = SpeculationConfig(draft, policy="fixed")
        small = LLM(arguments.same_target, speculation, dtype="float32")
        prompts = chat_prompts(
            small, arguments.prompts, arguments.num_prompts, arguments.longest_prompt
        )
        records = collect(
            small.load_models(speculation),
            prompts,
            SamplingParams(
                max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=0
            ),
            num_speculative_tokens=arguments.longest_draft,
        ).records
        reach = reach_of_chains(records, arguments.longest_draft)
        large = LLM(arguments.target, speculation, dtype="bfloat16", max_model_len=512)
        models = large.load_models(speculation)
        if arguments.latency_profile:
            latency = load_latency(arguments.latency_profile, models)
        else:
            latency = measure_latency(models, max(arguments.batch_sizes), arguments.longest_draft)
        first = reach[:, 0]
        table = Table(
            title=f"{arguments.target} with {draft}: acceptance {first.mean():.2f}, "
            f"quartiles {np.quantile(first, [0.25, 0.5, 0.75]).round(2).tolist()}"
        )
        for name in ("batch", *(f"γ={n}" for n in STATIC), "oracle", "room"):
            table.add_column(name, justify="right")
        results[draft] = {"acceptance": float(first.mean()), "batch": {}}
        for batch in arguments.batch_sizes:
            static = [static_goodput(reach, batch, n, latency) for n in STATIC]
            oracle = oracle_goodput(reach, batch, arguments.longest_draft, latency, max(static))
            room = oracle / max(static)
            results[draft]["batch"][batch] = {
                "static": {n: g / static[0] for n, g in zip(STATIC, static, strict=True)},
                "oracle": oracle / static[0],
                "room": room,
            }
            cells = [f"{g / static[0]:.2f}" for g in static]
            table.add_row(str(batch), *cells, f"{oracle / static[0]:.2f}", f"{room:.3f}")
        console.print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": results})


if __name__ == "__main__":
    main()
