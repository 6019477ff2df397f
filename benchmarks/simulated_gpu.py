"""Goodput of policies at pass times that were measured on a GPU. The times are simulated.

    python benchmarks/simulated_gpu.py --prompts gsm8k_test.jsonl --costs 7b/19=cuda_7b.json \
        --costs 1500m/9=cuda_1500m.json --costs 7b/3=cuda_7b.json,cuda_1500m.json

The models of the zoo run on this machine and decide which tokens are accepted. The duration of each
step is computed from its work: the target's pass from the number of verified tokens, each pass of
the draft from the number of requests that draft, and the companion's pass from the number of
scored tokens. These durations come from result files of ``benchmarks/cuda.py``. With a draft model,
the policies see only the simulated durations, and their prices start from them.

A file has the time that the target's pass and acceptance take, target only (one token per request)
and with a fixed draft length, and the time of the draft's passes, at several batch sizes. If a
second file is given after a comma, the pass of its target is the draft's. The companion's pass
takes as long as a pass of the draft over as many tokens. Beyond the measured numbers of tokens the
times are extrapolated. The number in a name is how many passes of the draft take as long as one of
the target, for one request.

What the simulation leaves out:

- The files' times include the prompts that steps also read, and steps of batches that are not full.
  Steps with drafts have a larger share of both, so a verified token costs too much here.
- Selection, signals and the host's work between passes take no time.
- A draft that stops early saves its further passes. On a GPU, Draftwise records several passes as
  one graph and cuts the draft afterwards, so they are not saved there.
- The draft's times are means over the passes of a step, so the first one takes as long as the
  others.
- The times were measured at temperature 0.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from draftwise.studies.sustained import (
    Contender,
    begin,
    best_static,
    best_static_unbiased,
    compete,
    contender,
    summary,
)
from figure_table import RELATIVE, figure_table, per_step
from rich.console import Console

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import chat_prompts
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import StepTimes
from draftwise.engine.step import Step

_STATIC = (1, 2, 3, 5)
_LEARNING_STEPS = 150


@dataclass(frozen=True)
class Costs:
    """Simulated costs of the passes of a machine.

    Attributes:
        target: seconds of the target's pass by number of tokens.
        draft: seconds of the draft's pass by number of requests, and of the companion's pass by
            number of tokens.
    """

    target: StageCost
    draft: StageCost

    @classmethod
    def read(cls, files: str) -> Costs:
        """Read one result file, or two for target and draft, separated by a comma."""
        first, _, second = files.partition(",")
        report = json.loads(Path(first).read_text(encoding="utf-8"))
        target = _target_cost(report)
        if second:
            return cls(target, _target_cost(json.loads(Path(second).read_text(encoding="utf-8"))))
        length = int(report["settings"]["num_speculative_tokens"])
        points = {
            int(size): _seconds(cell["fixed"], int(size), "draft") / length
            for size, cell in report["batch_sizes"].items()
        }
        return cls(target, _stage(points))

    def __call__(self, step: Step) -> StepTimes:
        """The duration of the parts of a step."""
        draft = sum(self.draft(count) for count in step.draft.drafting)
        companion = 0.0 if step.pipeline.oracle else self.draft(step.num_companion_tokens)
        prompt = step.batch.num_prompt_tokens
        verify = self.target(step.num_target_tokens + prompt)
        return StepTimes(draft, companion, 0.0, verify, 0.0, 0.0, prompt)

    def impose(self, each: Contender) -> None:
        """Let a contender's engine run at these costs."""
        engine = each.llm.engine
        engine.simulated_times = self
        if engine.latency is not None:
            engine.latency.restart(self.target, self.draft, self.draft)


def _target_cost(report: dict[str, Any]) -> StageCost:
    length = int(report["settings"]["num_speculative_tokens"])
    points: dict[int, float] = {}
    for size, cell in report["batch_sizes"].items():
        points[int(size)] = _seconds(cell["target only"], int(size), "verify", "accept")
        rows = int(size) * (1 + length)
        points[rows] = _seconds(cell["fixed"], int(size), "verify", "accept")
    return _stage(points)


def _seconds(figures: dict[str, Any], batch_size: int, *parts: str) -> float:
    """Mean seconds of parts of a step."""
    step = batch_size * figures["accepted_length"] / statistics.harmonic_mean(figures["runs"])
    return step * sum(figures["time_split"][part] for part in parts)


def _stage(points: dict[int, float]) -> StageCost:
    """A non-decreasing cost: neighbours that decrease have their mean."""
    groups: list[list[tuple[int, float]]] = []
    for point in sorted(points.items()):
        groups.append([point])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    pooled = {tokens: _mean(group) for group in groups for tokens, _ in group}
    return StageCost(tuple(map(float, pooled)), tuple(pooled.values()))


def _mean(group: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in group) / len(group)


def contenders(llm: LLM, arguments: argparse.Namespace) -> list[Contender]:
    """Target only, static lengths, and the policies."""
    result = []
    names = [("none", 1), *(("fixed", length) for length in _STATIC)]
    names += [(policy, arguments.num_speculative_tokens) for policy in arguments.policies]
    for policy, length in names:
        config = SpeculationConfig(
            arguments.draft, companion=arguments.companion, num_speculative_tokens=length
        )
        name = f"fixed:{length}" if policy == "fixed" else policy
        result += contender(llm, policy, config, name)
    return result


def show(console: Console, title: str, figures: dict[str, Any]) -> None:
    """Print one table."""
    kinds = ("tokens", "drafted", "scored", "verified")
    columns = RELATIVE | {kind: per_step(kind) for kind in kinds}
    columns["step ms"] = lambda f: f"{f['step_ms']:.2f}"
    shown = f"{title}: best static {best_static(figures)}"
    console.print(figure_table(shown, figures, columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--costs", action="append", required=True, metavar="NAME=FILE[,FILE]")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--longest-prompt", type=int, default=150)
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["svip", "smartspec", "sv-published", "sv", "adaptive"],
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--turn", type=float, default=0.5, help="simulated seconds per turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(width=110)
    started = time.strftime("%Y-%m-%d")
    llm = LLM(
        arguments.target,
        SpeculationConfig(arguments.draft, policy="none"),
        max_batch_size=max(arguments.batch_sizes),
        max_model_len=arguments.longest_prompt + arguments.max_tokens + 8,
        enable_prefix_caching=False,
    )
    prompts = chat_prompts(llm, arguments.prompts, 10**6, arguments.longest_prompt)
    random.Random(0).shuffle(prompts)
    prompts = prompts[: arguments.num_prompts]
    params = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=0
    )
    results: dict[str, Any] = {}
    for text in arguments.costs:
        name, _, files = text.partition("=")
        costs = Costs.read(files)
        own = results[name] = {
            "target_seconds": costs.target.to_dict(),
            "draft_seconds": costs.draft.to_dict(),
            "batch_sizes": {},
        }
        all_contenders = contenders(llm, arguments)
        for each in all_contenders:
            costs.impose(each)
        for batch_size in arguments.batch_sizes:
            begin(all_contenders, prompts, params, batch_size)
            compete(all_contenders, arguments.rounds, arguments.turn, _LEARNING_STEPS)
            figures = summary(all_contenders)
            show(console, f"simulated, {name}, batch {batch_size}", figures)
            best = {"name": best_static(figures), "ratio": best_static_unbiased(figures)}
            figures["best static"] = best
            own["batch_sizes"][str(batch_size)] = figures
            if arguments.output:
                write_report(
                    arguments.output,
                    vars(arguments),
                    {"started": started, "simulated": True, "results": results},
                )
        for each in all_contenders:
            each.restart()
            each.llm.close()


if __name__ == "__main__":
    main()
