"""Two versions of Draftwise in alternating processes: tokens per second, after / before.

    git worktree add /tmp/before HEAD~1
    python benchmarks/versions.py --before /tmp/before/src --after src

Each version has its own process, which keeps its models loaded. One process generates at a time.
Each round starts new processes, because processes of one version differ by some per cent. The two
take turns setting by setting, so that other load on the machine affects both alike. Prints
the median ratio of each setting and the geometric mean of the medians. Both versions must have the
public interface that this script uses.

With several draft lengths of ``fixed``, also prints the throughput of each other policy over that
of the best fixed length or of no speculation, before and after:

    python benchmarks/versions.py --before /tmp/before/src --policies none fixed:1 fixed:2 fixed:3 \
        fixed:5 adaptive:7 sv:7
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import IO, Any

BATCH_SIZES = (1, 8, 32)
TEMPERATURES = (0.0, 1.0)
# Requests of a turn, at least; smaller batches follow one another.
SMALLEST_RUN = 8
DRAFT_LENGTH = 4  # of policies without one
# Policies that ask a companion.
WITH_COMPANION = ("staged", "sv", "sv-predictable", "sv-published")


@dataclass(frozen=True)
class Setting:
    policy: str  # with its draft length: "fixed:3"
    batch_size: int
    temperature: float


CONTEST_KEYS = ("before", "after", "ratio")
# Tokens per second of each turn of both versions.
Rates = dict[Setting, tuple[list[float], list[float]]]


class Version:
    """A process that generates with one version of Draftwise."""

    def __init__(self, source: Path, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--generate", *_model_flags(arguments)]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()  # its models are loaded

    def tokens_per_second(self, setting: Setting) -> float:
        assert self._process.stdin is not None
        print(json.dumps(asdict(setting)), file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a version ended early, with status {self._process.wait()}")
        return line


def _model_flags(arguments: argparse.Namespace) -> list[str]:
    names = ("target", "draft", "companion", "dtype", "prompts", "max_tokens")
    flags = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    return [*flags, "--batch-sizes", *map(str, arguments.batch_sizes)]


def generate(arguments: argparse.Namespace, answers: IO[str]) -> None:
    """Generate for the settings on standard input; write tokens per second of each."""
    from draftwise import LLM, SamplingParams, SpeculationConfig

    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    llms: dict[str, Any] = {}

    def llm_of(contender: str) -> LLM:
        if contender not in llms:
            policy, _, length = contender.partition(":")
            speculation = SpeculationConfig(
                arguments.draft,
                companion=arguments.companion if policy in WITH_COMPANION else None,
                policy=policy,
                num_speculative_tokens=int(length or DRAFT_LENGTH),
            )
            # Prompts are repeated. An old version may have no prefix caching.
            has_prefixes = "enable_prefix_caching" in signature(LLM).parameters
            llms[contender] = LLM(
                arguments.target,
                speculation,
                dtype=arguments.dtype,
                max_batch_size=max(arguments.batch_sizes),
                **({"enable_prefix_caching": False} if has_prefixes else {}),
            )
        return llms[contender]

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        setting = Setting(**json.loads(line))
        llm = llm_of(setting.policy)
        batch = [prompts[i % len(prompts)] for i in range(setting.batch_size)]
        parameters = [
            SamplingParams(
                temperature=setting.temperature,
                max_tokens=arguments.max_tokens,
                seed=seed,
                ignore_eos=True,
            )
            for seed in range(setting.batch_size)
        ]
        num_tokens = 0
        start = time.perf_counter()
        for _ in range(0, max(SMALLEST_RUN, setting.batch_size), setting.batch_size):
            outputs = llm.generate(batch, parameters)
            num_tokens += sum(len(output.token_ids) for output in outputs)
        seconds = time.perf_counter() - start
        print(num_tokens / seconds, file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="source tree: a folder src")
    parser.add_argument("--after", type=Path, default=Path("src"))
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--policies", nargs="+", default=["fixed", "adaptive", "sv"])
    parser.add_argument("--prompts", default="examples/prompts.jsonl")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="each with new processes")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--warm-up-turns", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--generate", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        # What a library prints must not be taken for an answer.
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        generate(arguments, answers)
        return
    if arguments.before is None:
        parser.error("--before: missing")
    compare(arguments)


def run_round(arguments: argparse.Namespace, settings: Sequence[Setting], rates: Rates) -> None:
    """Start both versions, let them take turns, and add what they did to ``rates``."""
    versions = [Version(source, arguments) for source in (arguments.before, arguments.after)]
    for turn in range(arguments.warm_up_turns + arguments.turns):
        for setting in settings:
            for which in (0, 1) if turn % 2 else (1, 0):
                rate = versions[which].tokens_per_second(setting)
                if turn >= arguments.warm_up_turns:
                    rates[setting][which].append(rate)
    for version in versions:
        version.close()


def is_static(policy: str) -> bool:
    return policy.partition(":")[0] in ("none", "fixed")


def against_best_static(rates: Rates) -> list[dict[str, Any]]:
    """Throughput of each other policy over that of the best static draft length, before and after.

    The best static length is the same in both versions: the one with the largest geometric mean of
    their median rates. Where only one static setting was run there is nothing to compare with. The
    ratio after / before is that of the medians of the ratios of turns, which scatters less than the
    ratio of medians.
    """
    from turns import ratio_of_turns

    rows = []
    for setting, both in rates.items():
        alike = [
            rates[each]
            for each in rates
            if is_static(each.policy)
            and (each.batch_size, each.temperature) == (setting.batch_size, setting.temperature)
        ]
        if is_static(setting.policy) or len(alike) < 2:
            continue
        best = max(alike, key=lambda each: math.prod(map(statistics.median, each)))
        before, after = (
            statistics.median(own) / statistics.median(static)
            for own, static in zip(both, best, strict=True)
        )
        ratio = ratio_of_turns(*both)[0] / ratio_of_turns(*best)[0]
        rows.append(asdict(setting) | {"before": before, "after": after, "ratio": ratio})
    return rows


def show_contest(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="tokens/s over those of the best static draft length")
    for column in ("policy", "requests", "temperature", "before", "after", "after / before"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    for policy in sorted({row["policy"] for row in rows}):
        own = [row for row in rows if row["policy"] == policy]
        means = (statistics.geometric_mean(row[key] for row in own) for key in CONTEST_KEYS)
        Console().print(
            policy, *(f"{key} {mean:.3f}" for key, mean in zip(CONTEST_KEYS, means, strict=True))
        )


def compare(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table
    from turns import ratio_of_turns

    from draftwise.benchmark.report import write_report

    settings = [
        Setting(policy, batch_size, temperature)
        for policy in arguments.policies
        for temperature in arguments.temperatures
        for batch_size in arguments.batch_sizes
    ]
    rates: Rates = {each: ([], []) for each in settings}
    for number in range(arguments.rounds):
        run_round(arguments, settings, rates)
        print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr, flush=True)
    table = Table(title="tokens/s, after / before")
    for column in ("policy", "requests", "temperature", "ratio", "±", "before", "after"):
        table.add_column(column, justify="right")
    results = []
    for setting, (before, after) in rates.items():
        ratio, error = ratio_of_turns(before, after)
        row = asdict(setting) | {
            "ratio": ratio,
            "standard_error": error,
            "median_before": statistics.median(before),
            "median_after": statistics.median(after),
        }
        results.append(row)
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    mean = statistics.geometric_mean(row["ratio"] for row in results)
    Console().print(table, f"geometric mean: {mean:.3f}")
    figures: dict[str, Any] = {"geometric_mean": mean, "results": results}
    contest = against_best_static(rates)
    if contest:
        figures["against_best_static"] = contest
        show_contest(contest)
    if arguments.output:
        write_report(arguments.output, vars(arguments), figures)


if __name__ == "__main__":
    main()
