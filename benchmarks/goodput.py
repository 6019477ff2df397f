"""Goodput of all policies over batch sizes, in one interleaved run.

    python benchmarks/goodput.py --prompts gsm8k_test.jsonl humaneval.jsonl spec_bench.jsonl \
        --companion zoo:companion --output results/goodput.json

Every policy has an engine of its own on the same loaded weights, kept full: a request that ends is
followed by the next prompt. The engines take turns of a fraction of a second, in an order that is
shuffled every round, so that whatever else the machine does meets all alike. Counted are steps in
which exactly the batch size generates and no prompt is read: goodput is tokens gained in them over
their wall time. Policies that learn run some steps at every batch size before anything is counted.
What the oracle chooses is run again without it, and its tokens are divided by the time of that.

Reported per workload and batch size: goodput relative to no speculation with the standard error
over rounds, the best static draft length in hindsight, and each policy's share of the oracle. Small
batches have more rounds.
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
from replay import Script, record, replay
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import chat_prompts
from draftwise.engine.request import Request
from draftwise.policies import policy_class

STATIC = (1, 2, 3, 5, 7)
# Steps that an oracle's script has at least before it is replayed.
SCRIPTED_STEPS = 30
ALL_PROMPTS = 1_000_000
PARTS = ("draft", "companion", "select", "verify", "accept", "rest")
# Of these the right setting follows from what they are told, not from what they have seen.
NOTHING_TO_LEARN = {
    *("none", "fixed", "svip", "adaedl", "confidence", "disco", "specdec++", "replay"),
}
USING_A_PROFILE = {"adaptive", "sv", "sv-predictable", "sv-published", "disco", "specdec++"}


@dataclass
class Counts:
    """What was counted of one policy at one batch size and workload."""

    rounds: list[tuple[int, float]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    totals: dict[str, int] = field(
        default_factory=lambda: {"steps": 0, "drafted": 0, "verified": 0, "accepted": 0}
    )

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.rounds)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.rounds)


@dataclass
class Contender:
    """One policy with its engine, and what was counted of it."""

    name: str
    policy: str
    llm: LLM
    static: bool
    script: Script | None = None
    prompts: list[list[int]] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    batch_size: int = 1
    num_added: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    def begin(self, prompts: list[list[int]], params: SamplingParams, batch_size: int) -> None:
        """Begin with another workload or batch size."""
        self.restart()
        if self._writes:
            self.script.clear()
        self.prompts, self.params, self.batch_size = prompts, params, batch_size
        self.counts = Counts()

    def warm_up(self, num_steps: int) -> None:
        """Run without counting."""
        self._run(lambda steps, _: steps >= num_steps, None)
        if self._writes:
            self.script.clear()
            self._run(lambda steps, _: steps >= SCRIPTED_STEPS, None)

    @property
    def _writes(self) -> bool:
        return self.script is not None and self.policy == "oracle"

    def restart(self) -> None:
        """Begin with the first prompt again: how hard the prompts are should be alike for all."""
        for request in self.running.values():
            self.llm.engine.cancel(request)
        self.running, self.num_added = {}, 0

    def take_turn(self, seconds: float) -> None:
        """Run until so much time was counted."""
        if self._writes:  # what is replayed are the steps of the last turn
            self.script.clear()
        self._run(lambda _, spent: spent >= seconds, self.counts)

    def _run(self, is_done: Any, counts: Counts | None) -> None:
        engine = self.llm.engine
        tokens, spent, tried, steps = 0, 0.0, 0, 0
        while not is_done(steps, spent):
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
                if tried > 20_000:
                    raise RuntimeError("the batch is never full")
                continue
            steps += 1
            tokens += after["tokens"] - before["tokens"]
            spent += times.total
            if counts is not None:
                counts.totals["steps"] += 1
                for name in ("drafted", "verified", "accepted"):
                    counts.totals[name] += after[name] - before[name]
                for part in PARTS:
                    counts.parts[part] += getattr(times, part)
        if counts is not None:
            counts.rounds.append((tokens, spent))

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


def contenders(llm: LLM, arguments: argparse.Namespace) -> list[Contender]:
    """One for each static draft length, and one for each policy and longest draft."""
    result = [Contender("none", "none", speculating(llm, arguments, "none", 0), True)]
    for length in arguments.static:
        fixed = speculating(llm, arguments, "fixed", length)
        result.append(Contender(f"fixed {length}", "fixed", fixed, True))
    for text in arguments.policies:
        name, _, gamma_text = text.partition(":")
        for gamma in [int(gamma_text)] if gamma_text else arguments.num_speculative_tokens:
            each = Contender(
                f"{name} ≤{gamma}", name, speculating(llm, arguments, name, gamma), False
            )
            if name == "oracle":
                each.script = record(each.llm)
                again = speculating(llm, arguments, "fixed", gamma)
                replay(again, each.script)
                result.append(Contender(f"replay ≤{gamma}", "replay", again, False, each.script))
            result.append(each)
    return result


def speculating(llm: LLM, arguments: argparse.Namespace, policy: str, gamma: int) -> LLM:
    """An engine for one policy."""
    companion = arguments.companion if policy_class(policy).uses_companion() else None
    config = SpeculationConfig(
        draft=arguments.draft,
        companion=arguments.mid if policy == "staged" else companion,
        policy=policy,
        num_speculative_tokens=gamma,
        profile=arguments.profile if policy in USING_A_PROFILE else None,
        # The middle model is none of those that were measured, and nobody asks what it costs.
        latency_profile=None if policy == "staged" else arguments.latency_profile,
    )
    return llm.with_speculation(config)


def compete(everybody: list[Contender], arguments: argparse.Namespace, progress: Any) -> None:
    """Warm up, then take turns."""
    for contender in everybody:
        learns = contender.policy not in NOTHING_TO_LEARN
        contender.warm_up(arguments.warm_up_steps if learns else arguments.first_steps)
        contender.restart()
        progress()
    order = list(everybody)
    shuffle = random.Random(0)
    for _ in range(num_rounds(arguments.rounds, everybody[0].batch_size)):
        shuffle.shuffle(order)
        for contender in order:
            contender.take_turn(arguments.turn)
            progress()


def num_rounds(rounds: int, batch_size: int) -> int:
    """More where a turn tells less: a small batch gains few tokens in it."""
    return rounds * max(1, 4 - batch_size)


def best_static_unbiased(figures: dict[str, Any]) -> float:
    """The best static length chosen on one half of the rounds, as it did on the other half.

    The best of several noisy figures is better than it should be; this one is not.
    """
    static = {name: f["rounds"] for name, f in figures.items() if f["static"]}
    scores = []
    for half in (0, 1):
        chosen = max(static, key=lambda name: float(np.mean(static[name][half::2])))
        scores.append(float(np.mean(static[chosen][1 - half :: 2])))
    return float(np.mean(scores))


def summary(everybody: list[Contender]) -> dict[str, Any]:
    """Ratios to no speculation, with standard errors over rounds."""
    counts = {each.name: each.counts for each in everybody}
    base = counts["none"]
    figures: dict[str, Any] = {}
    for each in everybody:
        if each.policy == "replay":
            continue
        own, steps = each.counts, each.counts.totals["steps"]
        # Of the oracle: its own tokens, in the time that its steps take without it.
        timed = counts.get(each.name.replace("oracle", "replay"), own)
        seconds_per_step = timed.seconds / timed.totals["steps"]
        goodput = own.tokens / steps / seconds_per_step
        ratios = [
            (t / s) / (bt / bs) for (t, s), (bt, bs) in zip(own.rounds, base.rounds, strict=True)
        ]
        figures[each.name] = {
            "goodput": goodput,
            "ratio": goodput / (base.tokens / base.seconds),
            "standard_error": float(np.std(ratios) / np.sqrt(max(len(ratios) - 1, 1))),
            "rounds": [round(ratio, 3) for ratio in ratios],
            "static": each.static,
            "steps": steps,
            "tokens_per_request_step": own.tokens / steps / each.batch_size,
            "drafted_per_request_step": own.totals["drafted"] / steps / each.batch_size,
            "verified_per_request_step": own.totals["verified"] / steps / each.batch_size,
            "acceptance_rate": own.totals["accepted"] / max(own.totals["verified"], 1),
            "share_of_time": {part: own.parts[part] / own.seconds for part in PARTS},
            "step_ms": 1e3 * seconds_per_step,
        }
    return figures


def show(console: Console, title: str, figures: dict[str, Any]) -> None:
    static = {name: f["ratio"] for name, f in figures.items() if f["static"]}
    best = max(static, key=lambda name: static[name])
    oracles = [f["ratio"] for name, f in figures.items() if name.startswith("oracle")]
    unbiased = best_static_unbiased(figures)
    table = Table(
        title=f"{title}: best static {best} {static[best]:.3f}, on other rounds {unbiased:.3f}"
    )
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
    parser.add_argument("--num-prompts", type=int, default=64, help="of each file, drawn")
    parser.add_argument(
        "--longest-prompt", type=int, default=256, help="tokens; longer are left out"
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--sampling",
        nargs="+",
        default=["1"],
        help="temperatures, each with a top-p if one is given: 1 0.8:0.95",
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["adaptive", "sv", "oracle"],
        help="each with a longest draft if one is given: sv sv:7",
    )
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[5])
    parser.add_argument("--static", type=int, nargs="*", default=list(STATIC))
    parser.add_argument("--turn", type=float, default=0.5, help="seconds counted per turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-up-steps", type=int, default=150, help="of policies that learn")
    parser.add_argument("--first-steps", type=int, default=20, help="of the others")
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
    everybody = contenders(llm, arguments)
    for sampling in arguments.sampling:
        temperature, _, top_p = sampling.partition(":")
        params = SamplingParams(
            max_tokens=arguments.max_tokens,
            temperature=float(temperature),
            top_p=float(top_p or 1.0),
            ignore_eos=True,
        )
        for path in arguments.prompts:
            # Files hold one kind of task after the other; the contest is about all of them.
            prompts = chat_prompts(llm, [path], ALL_PROMPTS, arguments.longest_prompt)
            random.Random(0).shuffle(prompts)
            prompts = prompts[: arguments.num_prompts]
            for batch_size in arguments.batch_sizes:
                title = f"{path.stem}, temperature {sampling}, batch {batch_size}"
                for contender in everybody:
                    contender.begin(prompts, params, batch_size)
                with Progress(console=console, transient=True) as bar:
                    task = bar.add_task(
                        title, total=len(everybody) * (1 + num_rounds(arguments.rounds, batch_size))
                    )
                    compete(everybody, arguments, lambda b=bar, t=task: b.advance(t))
                figures = summary(everybody)
                show(console, title, figures)
                of_workload = results.setdefault(sampling, {}).setdefault(path.stem, {})
                of_workload[str(batch_size)] = figures
                if arguments.output:
                    figures_so_far = {"started": started, "results": results}
                    write_report(arguments.output, vars(arguments), figures_so_far)


if __name__ == "__main__":
    main()
