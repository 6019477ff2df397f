"""Whole answers from a cold start: policies of one or two versions, each over no speculation.

    git worktree add /tmp/before HEAD~1
    python benchmarks/whole_answers.py gsm8k.jsonl humaneval.jsonl --before /tmp/before/src \
        --target zoo:target@200m --draft zoo:draft --output results/whole_answers.json

A cell is a prompt file, a temperature and a batch size. In each of its turns, every contender
answers the same prompts, and every turn has other prompts. Every turn counts, the first one too,
with all that it has to learn. The time is that of ``LLM.generate``: prompts, steps, and what the
policy takes. Models are loaded, and latencies are measured, before the first turn. Before each cell
the policies forget what they have learnt.

Each version is a process of its own, which keeps its models. One of them works at a time, and they
take turns in an order that changes. A contender is a policy with its draft length: ``adaptive:7``,
or ``fixed:7-unguarded`` without the guard. ``none`` runs in the newer version.
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
from pathlib import Path
from typing import IO, Any

# Policies that ask a companion.
WITH_COMPANION = ("sv", "sv-predictable", "sv-published")
BASELINE = "none"


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
        self.ask({})

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


def answer(arguments: argparse.Namespace, answers: IO[str]) -> None:
    """Follow the orders on standard input: a contender forgets, or answers some prompts."""
    from draftwise import LLM, SamplingParams, SpeculationConfig
    from draftwise.benchmark.workload import load_workload

    llms: dict[str, LLM] = {}
    prompts: dict[str, list[Any]] = {}

    def llm_of(contender: str) -> LLM:
        if contender not in llms:
            name, _, rest = contender.partition(":")
            length, _, unguarded = rest.partition("-")
            speculation = None
            if name != BASELINE:
                speculation = SpeculationConfig(
                    arguments.draft,
                    companion=arguments.companion if name in WITH_COMPANION else None,
                    policy=name,
                    num_speculative_tokens=int(length),
                    **({"guard": False} if unguarded else {}),
                )
            llms[contender] = LLM(
                arguments.target,
                speculation,
                dtype=arguments.dtype,
                max_batch_size=max(arguments.batch_sizes),
                max_model_len=arguments.max_model_len,
            )
        return llms[contender]

    for line in sys.stdin:
        order = json.loads(line)
        if not order:
            for contender in arguments.contenders:
                llm_of(contender)
            print("{}", file=answers, flush=True)
            continue
        llm = llm_of(order["contender"])
        if "forget" in order:
            if order["contender"] != BASELINE:
                llm.engine.change_speculation(policy=order["contender"].partition(":")[0])
            print("{}", file=answers, flush=True)
            continue
        path = order["prompts"]
        if path not in prompts:
            most, longest = arguments.num_prompts, arguments.longest_prompt
            found = load_workload(llm, Path(path), most, longest, chat=not arguments.plain)
            prompts[path] = found.prompts
            random.Random(0).shuffle(prompts[path])
        first, count, temperature = order["first"], order["count"], order["temperature"]
        chosen = [prompts[path][(first + i) % len(prompts[path])] for i in range(count)]
        params = [
            SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens, seed=first + i)
            for i in range(count)
        ]
        start = time.perf_counter()
        outputs = llm.generate(chosen, params)
        seconds = time.perf_counter() - start
        num_tokens = sum(len(output.token_ids) for output in outputs)
        print(json.dumps({"tokens": num_tokens, "seconds": seconds}), file=answers, flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens and seconds of each turn, by cell and contender."""
    known = [option for option in sys.argv[1:] if option != "--answer"]
    versions = {"": Version(arguments.after, known)}
    if arguments.before is not None:
        versions["before "] = Version(arguments.before, known)
    contenders = [("", name) for name in arguments.contenders]
    if arguments.before is not None:
        contenders += [("before ", name) for name in arguments.both]
    cells: dict[str, Any] = {}
    random_order = random.Random(0)
    for path in arguments.prompts:
        for temperature in arguments.temperatures:
            for size in arguments.batch_sizes:
                for version, name in contenders:
                    versions[version].ask({"contender": name, "forget": True})
                turns: dict[str, list[dict[str, float]]] = {v + n: [] for v, n in contenders}
                count = max(size, arguments.least_answers)
                for turn in range(arguments.turns):
                    for version, name in random_order.sample(contenders, len(contenders)):
                        order = {
                            "contender": name,
                            "prompts": str(path),
                            "first": turn * count,
                            "count": count,
                            "temperature": temperature,
                        }
                        # A batch is full until its last answers.
                        done = [
                            versions[version].ask(order | {"first": turn * count + at, "count": n})
                            for at, n in batches(count, size)
                        ]
                        turns[version + name].append(
                            {key: sum(each[key] for each in done) for key in ("tokens", "seconds")}
                        )
                cell = f"{path.stem} T={temperature:g} b={size}"
                cells[cell] = turns
                print(cell, {k: round(v, 3) for k, v in ratios(turns).items()}, flush=True)
                if arguments.output:
                    save(arguments, cells)
    for version in versions.values():
        version.close()
    return cells


def batches(count: int, size: int) -> list[tuple[int, int]]:
    """First answer and number of answers of each call."""
    return [(at, min(size, count - at)) for at in range(0, count, size)]


def ratios(turns: dict[str, list[dict[str, float]]], last: int | None = None) -> dict[str, float]:
    """Tokens per second over those of no speculation, over the first turns."""

    def rate(name: str) -> float:
        own = turns[name][:last]
        return sum(each["tokens"] for each in own) / sum(each["seconds"] for each in own)

    return {name: rate(name) / rate(BASELINE) for name in turns if name != BASELINE}


def save(arguments: argparse.Namespace, cells: dict[str, Any]) -> None:
    settings = {name: str(value) for name, value in vars(arguments).items()}
    report = {"settings": settings, "cells": cells}
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def show(cells: dict[str, Any]) -> None:
    """Geometric means, and the lowest cells, after one turn and after all of them."""
    names = [name for name in next(iter(cells.values())) if name != BASELINE]
    for name in names:
        first = [ratios(turns, 1)[name] for turns in cells.values()]
        whole = sorted((ratios(turns)[name], cell) for cell, turns in cells.items())
        values = [value for value, _ in whole]
        print(
            f"{name:24} first turn {statistics.geometric_mean(first):.3f}, all turns "
            f"{statistics.geometric_mean(values):.3f}; below 0.98: {sum(v < 0.98 for v in values)}"
            f", below 0.97: {sum(v < 0.97 for v in values)}; lowest {whole[0][0]:.3f} {whole[0][1]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, nargs="+", help="JSON lines")
    parser.add_argument("--before", type=Path, help="source tree of an older version: a folder src")
    parser.add_argument("--after", type=Path, default=Path("src"))
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--contenders", nargs="+", default=[BASELINE, "adaptive:7", "fixed:7"])
    parser.add_argument("--both", nargs="+", default=["adaptive:7"], help="in both versions")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--least-answers", type=int, default=2, help="of a turn")
    parser.add_argument("--max-tokens", type=int, default=96)
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
        answer(arguments, answers)
        return
    show(measure(arguments))


if __name__ == "__main__":
    main()
