"""Policies and drafts of one or two versions of Draftwise, on whole answers, over no speculation.

    git worktree add /tmp/before HEAD~1
    python benchmarks/versions.py gsm8k.jsonl humaneval.jsonl --before /tmp/before/src \
        --contenders none fixed:3 fixed:7 adaptive:7 --output versions.json

A cell is a prompt file, a temperature and a batch size. In each of its turns, every contender of
every version answers the same prompts, and every turn has other prompts. Contenders take turns in
an order that changes. The time is that of ``LLM.generate``: prompts, steps, and what the policy
takes. Before each cell the policies forget what they have learnt, so that without
``--warm-up-turns`` the first turn is a cold start.

Each version is a process of its own, which keeps its models loaded, and one process works at a
time. Its contenders share the target's weights. Each round starts new processes, because processes
of one version differ by some per cent.
A contender is a policy with its draft length: ``adaptive:7``, or ``fixed:7-unguarded`` without the
guard. It may have a draft of its own: ``adaptive:7@DRAFT``, in place of ``--draft``. Both versions
must have the public interface that this script uses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import IO, Any

BASELINE = "none"
BEFORE, AFTER = "before", "after"
# Policies that ask a companion.
WITH_COMPANION = ("staged", "sv", "sv-predictable", "sv-published")


class Version:
    """A process that answers with one version of Draftwise."""

    def __init__(self, source: Path, command_line: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--answer", *command_line],
            env={**os.environ, "PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask({})  # its models are loaded

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a version ended early, with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


class Answering:
    """The models and prompts of a version's process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.llms: dict[str, Any] = {}
        for each in arguments.contenders:
            self.llms[each] = self._load(each)
        self.prompts: dict[str, list[Any]] = {}

    def _load(self, contender: str) -> Any:
        from draftwise import LLM, SpeculationConfig

        arguments = self.arguments
        policy, _, draft = contender.partition("@")
        name, _, rest = policy.partition(":")
        length, _, unguarded = rest.partition("-")
        speculation = None
        if name != BASELINE:
            speculation = SpeculationConfig(
                draft or arguments.draft,
                companion=arguments.companion if name in WITH_COMPANION else None,
                policy=name,
                num_speculative_tokens=int(length),
                **({"guard": False} if unguarded else {}),
            )
        # All share the target's weights: their place in memory changes the time of a pass by some
        # per cent. An old version may not share them.
        first = next(iter(self.llms.values()), None)
        if hasattr(first, "with_speculation"):
            return first.with_speculation(speculation)
        # Prompts may come again. An old version may have no prefix caching.
        has_prefixes = "enable_prefix_caching" in signature(LLM).parameters
        return LLM(
            arguments.target,
            speculation,
            dtype=arguments.dtype,
            max_batch_size=max(arguments.batch_sizes),
            max_model_len=arguments.max_model_len,
            **({"enable_prefix_caching": False} if has_prefixes else {}),
        )

    def forget(self, contender: str) -> None:
        """Start the policy anew."""
        if contender != BASELINE:
            policy = contender.partition(":")[0]
            self.llms[contender].engine.change_speculation(policy=policy)

    def answer(
        self, contender: str, path: str, first: int, count: int, size: int, temperature: float
    ) -> dict[str, float]:
        """Answer some prompts, batch after batch; returns tokens, steps of requests and seconds."""
        from draftwise import SamplingParams

        prompts = self._prompts(path)
        num_tokens, num_steps, seconds = 0, 0, 0.0
        # A batch is full until its last answers.
        for start in range(first, first + count, size):
            numbers = range(start, min(start + size, first + count))
            chosen = [prompts[number % len(prompts)] for number in numbers]
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=self.arguments.max_tokens,
                    seed=number,
                    ignore_eos=self.arguments.ignore_eos,
                )
                for number in numbers
            ]
            begin = time.perf_counter()
            outputs = self.llms[contender].generate(chosen, params)
            seconds += time.perf_counter() - begin
            num_tokens += sum(len(output.token_ids) for output in outputs)
            num_steps += sum(output.speculation.num_steps for output in outputs)
        return {"tokens": num_tokens, "steps": num_steps, "seconds": seconds}

    def _prompts(self, path: str) -> list[Any]:
        from draftwise.benchmark.workload import load_workload

        if path not in self.prompts:
            most, longest = self.arguments.num_prompts, self.arguments.longest_prompt
            llm, chat = next(iter(self.llms.values())), not self.arguments.plain
            self.prompts[path] = load_workload(llm, Path(path), most, longest, chat).prompts
            random.Random(0).shuffle(self.prompts[path])
        return self.prompts[path]


def follow_orders(arguments: argparse.Namespace, answers: IO[str]) -> None:
    """Follow the orders on standard input: a contender forgets, or answers some prompts."""
    answering = Answering(arguments)
    for line in sys.stdin:
        order, found = json.loads(line), {}
        if "forget" in order:
            answering.forget(order["forget"])
        elif order:
            found = answering.answer(**order)
        print(json.dumps(found), file=answers, flush=True)


def measure(arguments: argparse.Namespace, cells: dict[str, Any]) -> None:
    """Add what every turn answered to ``cells``, by cell and contender with version."""
    known = [option for option in sys.argv[1:] if option != "--answer"]
    sources = {AFTER: arguments.after}
    if arguments.before is not None:
        sources[BEFORE] = arguments.before
    everybody = [(version, name) for version in sources for name in arguments.contenders]
    for number in range(arguments.rounds):
        versions = {version: Version(source, known) for version, source in sources.items()}
        for path in arguments.prompts:
            for temperature in arguments.temperatures:
                for size in arguments.batch_sizes:
                    cell = f"{path.stem} T={temperature:g} b={size}"
                    turns = cells.setdefault(cell, {each: [] for each in everybody})
                    work = {"path": str(path), "size": size, "temperature": temperature}
                    take_turns(arguments, versions, work, turns)
                    print(f"round {number + 1}: {cell}", file=sys.stderr, flush=True)
                    if arguments.output:
                        save(arguments, rows_of(cells))
        for version in versions.values():
            version.close()


def take_turns(
    arguments: argparse.Namespace,
    versions: dict[str, Version],
    work: dict[str, Any],
    turns: dict[tuple[str, str], list[dict[str, float]]],
) -> None:
    """All turns of a cell in one round; adds what was answered to ``turns``."""
    from draftwise.benchmark.turns import in_turns

    for version, name in turns:
        versions[version].ask({"forget": name})
    count, untimed = max(work["size"], arguments.least_answers), arguments.warm_up_turns
    for turn, (version, name) in in_turns(list(turns), untimed + arguments.turns):
        order = work | {"contender": name, "first": turn * count, "count": count}
        done = versions[version].ask(order)
        if turn >= untimed:
            turns[version, name].append(done)


def rows_of(cells: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios of each contender in each cell, with their quartiles over the turns.

    ``ratio`` is over no speculation in the same version, and ``over_best_static`` over the best
    fixed length or none. ``after_over_before`` has the median over turns and its standard error.
    """
    from draftwise.benchmark.turns import median_ratio, ratios_of_turns, spread

    rows = []
    for cell, answered in cells.items():
        rates = {
            each: [turn["tokens"] / turn["seconds"] for turn in turns]
            for each, turns in answered.items()
        }
        for (version, name), own in rates.items():
            static = {
                other: statistics.median(turns)
                for (of, other), turns in rates.items()
                if of == version and other.partition(":")[0] in (BASELINE, "fixed")
            }
            row: dict[str, Any] = {"at": cell, "version": version, "contender": name}
            row["tokens_per_second"] = spread(own)
            tokens, steps = (
                sum(turn[what] for turn in answered[version, name]) for what in ("tokens", "steps")
            )
            row["tokens_per_step"] = tokens / steps
            if (version, BASELINE) in rates:
                base = rates[version, BASELINE]
                row["ratio"] = spread(ratios_of_turns(own, base))
                row["first_turn"] = own[0] / base[0]
            if static:
                row["over_best_static"] = statistics.median(own) / max(static.values())
            if version == AFTER and (BEFORE, name) in rates:
                ratio, error = median_ratio(rates[BEFORE, name], own)
                row |= {"after_over_before": ratio, "standard_error": error}
            rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of all cells, and the geometric mean and the lowest cell of each ratio."""
    from rich.console import Console
    from rich.table import Table

    figures = ("tokens_per_step", "ratio", "first_turn", "over_best_static")
    figures += ("after_over_before", "standard_error")
    heads = ("at", "version", "contender")
    table, console = Table(title="tokens per second"), Console()
    for head in (*heads, *figures):
        table.add_column(head.replace("_", " "), justify="left" if head in heads else "right")
    for row in rows:
        numbers = (_number(row.get(figure)) for figure in figures)
        shown = ("" if number is None else f"{number:.3f}" for number in numbers)
        table.add_row(*(row[head] for head in heads), *shown)
    console.print(table)
    for version, name in dict.fromkeys((row["version"], row["contender"]) for row in rows):
        own = [row for row in rows if (row["version"], row["contender"]) == (version, name)]
        for figure in figures[:-1]:
            values = [_number(row[figure]) for row in own if figure in row]
            if values:
                mean = statistics.geometric_mean(values)
                console.print(f"{version} {name}, {figure}: {mean:.3f}, lowest {min(values):.3f}")


def _number(figure: Any) -> Any:
    return figure["median"] if isinstance(figure, dict) else figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, nargs="+", help="JSON lines")
    parser.add_argument("--before", type=Path, help="source tree of an older version: a folder src")
    parser.add_argument("--after", type=Path, default=Path("src"))
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--contenders", nargs="+", default=[BASELINE, "fixed:7", "adaptive:7"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=1, help="each with new processes")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--warm-up-turns", type=int, default=0, help="untimed, for every contender")
    parser.add_argument("--least-answers", type=int, default=2, help="of a turn")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--ignore-eos", action="store_true", help="answers of equal length")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-prompts", type=int, default=200, help="of a file, at most")
    parser.add_argument("--longest-prompt", type=int, default=600, help="tokens")
    parser.add_argument("--plain", action="store_true", help="prompts without a chat template")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        # What a library prints must not be taken for an answer.
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        follow_orders(arguments, answers)
        return
    cells: dict[str, Any] = {}
    try:
        measure(arguments, cells)
    except KeyboardInterrupt:
        print("interrupted; these cells were measured", file=sys.stderr)
        cells = {
            cell: {each: own[: min(map(len, turns.values()))] for each, own in turns.items()}
            for cell, turns in cells.items()
            if all(turns.values())
        }
    rows = rows_of(cells)
    show(rows)
    if arguments.output:
        save(arguments, rows)


def save(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what was measured so far."""
    from draftwise.benchmark.report import write_report

    write_report(arguments.output, vars(arguments), {"results": rows})


if __name__ == "__main__":
    main()
