"""Goodput of all policies over batch sizes, in one interleaved run.

    python benchmarks/goodput.py --prompts gsm8k_test.jsonl humaneval.jsonl spec_bench.jsonl \
        --companion zoo:companion --output results/goodput.json

Every policy has an engine of its own on the same loaded weights, kept full: a request that ends is
followed by the next prompt. The engines take turns of a fraction of a second, in an order that is
shuffled every round, so that whatever else the machine does meets all alike. Counted are steps in
which exactly the batch size generates and no prompt is read: goodput is tokens gained in them over
their wall time. What the oracle is told is not counted.

Reported per workload and batch size: goodput relative to no speculation with the standard error
over rounds, the best static draft length in hindsight, and each policy's share of the oracle.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import chat_prompts
from draftwise.engine.request import Request
from draftwise.policies import policy_class

STATIC = (1, 2, 3, 5, 7)
PARTS = ("draft", "companion", "select", "verify", "accept", "rest")


@dataclass
class Contender:
    """One policy with its engine, and what was counted of it."""

    name: str
    llm: LLM
    prompts: list[list[int]]
    params: SamplingParams
    batch_size: int
    static: bool
    num_added: int = 0
    rounds: list[tuple[int, float]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    running: dict[int, Request] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: {"steps": 0, "drafted": 0, "verified": 0, "accepted": 0}
    )

    def take_turn(self, seconds: float, counted: bool) -> None:
        """Run until so much time was counted."""
        engine = self.llm.engine
        tokens, spent = 0, 0.0
        tried = 0
        while spent < seconds:
            while engine.num_unfinished < self.batch_size:
                self._add()
            before = self._totals()
            engine.step()
            after = self._totals()
            for key in [k for k, r in self.running.items() if r.finish_reason is not None]:
                del self.running[key]
            tried += 1
            times = engine.times
            generating = after["steps"] - before["steps"]
            if times.num_prompt_tokens or generating != self.batch_size:
                if tried > 10_000:
                    raise RuntimeError("the batch is never full")
                continue
            tokens += after["tokens"] - before["tokens"]
            spent += times.total
            if counted:
                self.counts["steps"] += 1
                for name in ("drafted", "verified", "accepted"):
                    self.counts[name] += after[name] - before[name]
                for part in PARTS:
                    self.parts[part] += getattr(times, part)
        if counted:
            self.rounds.append((tokens, spent))

    def goodput(self) -> float:
        return sum(t for t, _ in self.rounds) / sum(s for _, s in self.rounds)

    def _add(self) -> None:
        ids = self.prompts[self.num_added % len(self.prompts)]
        request = self.llm.engine.add(None, ids, self.params)
        self.running[request.request_id] = request
        self.num_added += 1

    def _totals(self) -> dict[str, int]:
        stats = [r.stats for r in self.running.values()]
        return {
            "steps": sum(s.num_steps for s in stats),
            "tokens": sum(s.num_tokens for s in stats),
            "drafted": sum(s.num_drafted for s in stats),
            "verified": sum(s.num_verified for s in stats),
            "accepted": sum(s.num_accepted for s in stats),
        }


def contenders(
    llm: LLM, arguments: argparse.Namespace, prompts: list[list[int]], batch_size: int
) -> list[Contender]:
    """One for each static draft length, and one for each policy and longest draft."""
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        ignore_eos=True,
    )
    settings: list[tuple[str, str, int, bool]] = [("none", "none", 0, True)]
    settings += [(f"fixed {n}", "fixed", n, True) for n in arguments.static]
    for gamma in arguments.num_speculative_tokens:
        settings += [(f"{name} ≤{gamma}", name, gamma, False) for name in arguments.policies]
    result = []
    for label, policy, gamma, static in settings:
        companion = arguments.companion if policy_class(policy).uses_companion() else None
        if policy == "staged":
            companion = arguments.mid
        config = SpeculationConfig(
            draft=arguments.draft,
            companion=companion,
            policy=policy,
            num_speculative_tokens=gamma,
            profile=None
            if policy_class(policy).judged_by_target
            else profile_for(arguments, policy),
            latency_profile=arguments.latency_profile,
        )
        result.append(
            Contender(label, llm.with_speculation(config), prompts, params, batch_size, static)
        )
    return result


def profile_for(arguments: argparse.Namespace, policy: str) -> str | None:
    """The acceptance profile, for policies that it can be of use to."""
    known = {"adaptive", "sv", "sv-predictable", "sv-published", "disco", "specdec++"}
    return arguments.profile if policy in known else None


def compete(everybody: list[Contender], arguments: argparse.Namespace, progress: Any) -> None:
    order = list(everybody)
    shuffle = random.Random(0)
    for number in range(arguments.rounds + arguments.warm_up_rounds):
        shuffle.shuffle(order)
        for contender in order:
            contender.take_turn(arguments.turn, number >= arguments.warm_up_rounds)
            progress()


def summary(everybody: list[Contender]) -> dict[str, Any]:
    """Ratios to no speculation, with standard errors over rounds."""
    base = everybody[0]
    figures: dict[str, Any] = {}
    for each in everybody:
        ratios = [
            (t / s) / (bt / bs) for (t, s), (bt, bs) in zip(each.rounds, base.rounds, strict=True)
        ]
        steps = each.counts["steps"]
        seconds = sum(s for _, s in each.rounds)
        figures[each.name] = {
            "goodput": each.goodput(),
            "ratio": each.goodput() / base.goodput(),
            "standard_error": float(np.std(ratios) / np.sqrt(max(len(ratios) - 1, 1))),
            "static": each.static,
            "steps": steps,
            "tokens_per_request_step": sum(t for t, _ in each.rounds) / steps / each.batch_size,
            "drafted_per_request_step": each.counts["drafted"] / steps / each.batch_size,
            "verified_per_request_step": each.counts["verified"] / steps / each.batch_size,
            "acceptance_rate": each.counts["accepted"] / max(each.counts["verified"], 1),
            "share_of_time": {part: value / seconds for part, value in each.parts.items()},
            "step_ms": 1e3 * seconds / steps,
        }
    return figures


def show(console: Console, title: str, figures: dict[str, Any]) -> None:
    static = {name: f["ratio"] for name, f in figures.items() if f["static"]}
    best = max(static, key=lambda name: static[name])
    oracles = [f["ratio"] for name, f in figures.items() if name.startswith("oracle")]
    table = Table(title=f"{title}: best static {best} {static[best]:.3f}")
    for name in ("policy", "× none", "±", "× best static", "of oracle", "tokens", "drafted"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name in ("verified", "accepted", "select", "step ms"):
        table.add_column(name, justify="right")
    for name, f in figures.items():
        table.add_row(
            name,
            f"{f['ratio']:.3f}",
            f"{f['standard_error']:.3f}",
            f"{f['ratio'] / static[best]:.3f}",
            f"{f['ratio'] / max(oracles):.2f}" if oracles else "",
            f"{f['tokens_per_request_step']:.2f}",
            f"{f['drafted_per_request_step']:.2f}",
            f"{f['verified_per_request_step']:.2f}",
            f"{f['acceptance_rate']:.2f}",
            f"{f['share_of_time']['select']:.1%}",
            f"{f['step_ms']:.1f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--mid", default="zoo:mid", help="the middle model of staged speculation")
    parser.add_argument("--profile", help="acceptance profile of the triple")
    parser.add_argument("--latency-profile", help="latency profile of the machine")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=64, help="of each file")
    parser.add_argument(
        "--longest-prompt", type=int, default=256, help="tokens; longer are left out"
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--policies", nargs="+", default=["adaptive", "sv", "oracle"])
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[5, 7])
    parser.add_argument("--static", type=int, nargs="*", default=list(STATIC))
    parser.add_argument("--turn", type=float, default=0.5, help="seconds counted per turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-up-rounds", type=int, default=3)
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
    )
    started = time.strftime("%Y-%m-%d")
    results: dict[str, Any] = {}
    for path in arguments.prompts:
        prompts = chat_prompts(llm, [path], arguments.num_prompts, arguments.longest_prompt)
        for batch_size in arguments.batch_sizes:
            everybody = contenders(llm, arguments, prompts, batch_size)
            turns = len(everybody) * (arguments.rounds + arguments.warm_up_rounds)
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task(f"{path.stem}, batch {batch_size}", total=turns)
                compete(everybody, arguments, lambda b=bar, t=task: b.advance(t))
            figures = summary(everybody)
            show(console, f"{path.stem}, batch {batch_size}", figures)
            results.setdefault(path.stem, {})[str(batch_size)] = figures
            del everybody
            if arguments.output:
                figures_so_far = {"started": started, "results": results}
                write_report(arguments.output, vars(arguments), figures_so_far)


if __name__ == "__main__":
    main()
