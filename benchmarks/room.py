"""Possible speed-up over the best static draft length: the oracle, and thresholds on signals.

    python benchmarks/room.py --prompts gsm8k_test.jsonl humaneval.jsonl spec_bench.jsonl \
        --output benchmarks/results/room.json

Plain speculative decoding provides the acceptance probability of every drafted token, and a latency
model of this machine provides the pass times. From these, the benchmark computes the goodput of
every static draft length and of an oracle. The oracle knows the acceptance of all tokens before
they are drafted, at no cost. It chooses the draft and verification lengths that maximise the
goodput of the whole batch. Verification is token by token, and prefill is not included.

Between the two are thresholds on estimated acceptance, chosen in hindsight. "signals" uses the
product of P(accept | H, q(x), history, position). "companion" also uses S and A, and includes the
time of a companion's pass over all drafted tokens. Both estimates are cross-validated between two
halves of the drafts. The time of the selection itself is not included.
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
from draftwise.estimators.combined import Inputs, SignalModel, Signals
from draftwise.estimators.records import Records
from draftwise.profiling.acceptance import collect
from draftwise.profiling.latency import load_latency, measure_latency

STATIC = (0, 1, 2, 3, 5, 7)
CONTEXT = 150
NUM_STEPS = 400
THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def whole_chains(records: Records, length: int) -> np.ndarray:
    """``[chains, length]`` indices of the tokens of drafts with at least ``length`` tokens."""
    starts = np.flatnonzero(records.position == 0)
    ends = np.append(starts[1:], len(records))
    return starts[ends - starts >= length][:, None] + np.arange(length)


def estimated(records: Records, chains: np.ndarray, inputs: Inputs) -> np.ndarray:
    """``[chains, length]`` P of each token, from a model fitted to the other half of the drafts."""
    half = len(chains) // 2
    result = np.zeros(chains.shape)
    for part, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        model = SignalModel.fit(records.take(chains[other].ravel()), inputs)
        signals = Signals.of(records.take(chains[part].ravel()))
        result[part] = model.predict(signals).reshape(-1, chains.shape[1])
    return result


def threshold_goodput(
    reach: np.ndarray,
    free: np.ndarray,
    scored: np.ndarray | None,
    batch: int,
    latency: LatencyModel,
) -> float:
    """Goodput of the best pair of thresholds: for drafting a token, and for verifying it.

    Args:
        reach: ``[chains, longest]`` probability that all tokens up to each are accepted.
        free: ``[chains, longest]`` P of each token without a companion.
        scored: ``[chains, longest]`` P of each token with a companion; ``None`` without one.
        batch: number of requests.
        latency: latency model.
    """
    longest = reach.shape[1]
    rows = np.random.default_rng(0).integers(0, len(reach), (NUM_STEPS, batch))
    target = np.array(
        [latency.target_seconds(n, batch * CONTEXT) for n in range(batch * (longest + 1) + 1)]
    )
    draft = np.array([0.0, *(latency.draft_seconds(n) for n in range(1, batch + 1))])
    scoring = np.array([latency.companion_seconds(n) for n in range(batch * longest + 1)])
    before = np.cumprod(np.hstack([np.ones((len(free), 1)), free[:, :-1]]), axis=1)
    known = np.cumprod(free if scored is None else scored, axis=1)
    best = 0.0
    for length in range(1, longest + 1):
        for from_reach in THRESHOLDS:
            drafted = (before[:, :length] >= from_reach)[rows]
            counts = drafted.sum(axis=1)
            seconds = draft[counts].sum(axis=1)
            seconds = seconds + latency.first_draft_extra * (counts[:, 0] > 0)
            if scored is not None:
                seconds = seconds + scoring[counts.sum(axis=1)]
            for threshold in THRESHOLDS:
                kept = drafted & (known[:, :length] >= threshold)[rows]
                tokens = batch + (kept * reach[:, :length][rows]).sum(axis=(1, 2))
                whole = seconds + target[batch + kept.sum(axis=(1, 2))]
                best = max(best, float(tokens.sum() / whole.sum()))
    return best


def static_goodput(reach: np.ndarray, batch: int, length: int, latency: LatencyModel) -> float:
    seconds = latency.target_seconds(batch * (1 + length), batch * CONTEXT)
    seconds += latency.drafting_seconds([batch] * length)
    return batch * (1 + float(reach[:, :length].sum(axis=1).mean())) / seconds


def oracle_goodput(
    reach: np.ndarray, batch: int, longest: int, latency: LatencyModel, start: float
) -> float:
    """Maximum ratio of expected tokens to time, by Dinkelbach's algorithm."""
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
                depth = chosen.sum(axis=0)  # rows are non-increasing, so these are prefixes
                gained = batch + float((rows * chosen).sum())
                spent = target[batch + int(depth.sum())] + sum(draft[int(k)] for k in depth)
                spent += latency.first_draft_extra if depth.any() else 0.0
                best = max(best, (gained - goodput * spent, gained, spent))
            tokens += best[1]
            seconds += best[2]
        goodput = tokens / seconds
    return goodput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--drafts", nargs="+", default=["zoo:draft", "zoo:companion"])
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument(
        "--same-target", default="zoo:target", help="small model with the same logits"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=40, help="per file")
    parser.add_argument(
        "--longest-prompt", type=int, default=300, help="maximum number of prompt tokens"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--longest-draft", type=int, default=7)
    parser.add_argument("--latency-profile")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    console = Console(width=120)
    results: dict[str, Any] = {}
    for draft in arguments.drafts:
        companion = None if draft == arguments.companion else arguments.companion
        policy = "fixed" if companion is None else "sv"
        speculation = SpeculationConfig(draft, companion, policy=policy)
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
        chains = whole_chains(records, arguments.longest_draft)
        reach = np.cumprod(records.acceptance[chains], axis=1)
        free = estimated(records, chains, Inputs.FREE)
        scored = None if companion is None else estimated(records, chains, Inputs.COMBINED)
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
        known = ("signals", "companion", "oracle")
        for name in ("batch", *(f"γ={n}" for n in STATIC), *(f"{n} / best" for n in known)):
            table.add_column(name, justify="right")
        results[draft] = {"acceptance": float(first.mean()), "batch": {}}
        for batch in arguments.batch_sizes:
            static = [static_goodput(reach, batch, n, latency) for n in STATIC]
            best = max(static)
            room = {
                "signals": threshold_goodput(reach, free, None, batch, latency) / best,
                "oracle": oracle_goodput(reach, batch, arguments.longest_draft, latency, best)
                / best,
            }
            if scored is not None:
                room["companion"] = threshold_goodput(reach, free, scored, batch, latency) / best
            results[draft]["batch"][batch] = {
                "static": {n: g / static[0] for n, g in zip(STATIC, static, strict=True)},
                "room": room,
            }
            cells = [f"{g / static[0]:.2f}" for g in static]
            shown = [f"{room[name]:.3f}" if name in room else "" for name in known]
            table.add_row(str(batch), *cells, *shown)
        console.print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": results})


if __name__ == "__main__":
    main()
