"""Runs `draftwise benchmark` for several workloads and temperatures, and joins the results.

    python benchmarks/workloads.py runs gsm8k.jsonl humaneval.jsonl --chats mt_bench.jsonl \
        --temperatures 0 0.8 --output joined.json -- --target MODEL --draft suffix --stop-at-eos

Options after ``--`` are those of `draftwise benchmark`. Each pair of a workload and a temperature
is a run of its own, in a folder of its own: an interrupted measurement goes on where it ended, and
``--only`` limits it to some of the pairs. ``--chats`` are conversations, of which the last turn is
measured. Temperatures above 0 sample with top-p 0.95.

The table has each policy's goodput relative to no speculation, the quartiles over rounds, the share
of repeated text, the number of answers that equal those of the target alone at temperature 0, and
geometric means over workloads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwise.benchmark.titles import BASELINE, is_complete

TOP_P = 0.95
# Settings that may differ between runs that are shown together.
_OWN_SETTINGS = (
    "workload",
    "output",
    "temperature",
    "top_p",
    "chat_template",
    "multi_turn",
    "chat",
    "longest_prompt",
    "max_model_len",
    "compare",
    "rounds",
    "learning_turns",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="has a folder for each run")
    parser.add_argument("workloads", type=Path, nargs="*", help="JSON lines")
    parser.add_argument("--chats", type=Path, nargs="*", default=[], help="JSON lines with turns")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--output", type=Path, help="JSON file with the joined results")
    parser.add_argument("--only", nargs="*", help="names of the runs to measure, such as qa-T0.8")
    own, options = _split(sys.argv[1:])
    arguments = parser.parse_args(own)
    for workload, is_chat in [(path, False) for path in arguments.workloads] + [
        (path, True) for path in arguments.chats
    ]:
        for temperature in arguments.temperatures:
            name = f"{workload.stem}{'-chat' if is_chat else ''}-T{temperature:g}"
            if arguments.only is None or name in arguments.only:
                measure(arguments.folder / name, workload, is_chat, temperature, options)
    joined = join(arguments.folder)
    if arguments.output:
        arguments.output.write_text(json.dumps(joined, indent=2) + "\n", encoding="utf-8")
    show(joined)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Arguments before and after ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def measure(
    folder: Path, workload: Path, is_chat: bool, temperature: float, options: list[str]
) -> None:
    """Run the command, unless the folder has its results."""
    command = [str(Path(sys.executable).with_name("draftwise")), "benchmark"]
    command += ["--workload", str(workload), "--output", str(folder)]
    command += ["--temperature", str(temperature)]
    command += ["--top-p", str(TOP_P)] if temperature else []
    command += ["--multi-turn"] if is_chat else []
    command += options
    if (folder / "results.json").exists():
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        known = " ".join(["draftwise", *command[1:]])
        if results["command"] != known:
            sys.exit(f"{folder} has results of another command: {results['command']}")
        if results.get("is_complete", True):
            return
    subprocess.run(command, check=True)


def join(folder: Path) -> dict[str, Any]:
    """The results of all runs in a folder, with the settings that they share."""
    joined: dict[str, Any] = {"runs": {}}
    for path in sorted(folder.glob("*/results.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        shared = {k: v for k, v in results["settings"].items() if k not in _OWN_SETTINGS}
        if not results.get("is_complete", True):
            sys.exit(f"{path} is not complete: run the same command again")
        for key in ("machine", "kernels", "versions", "models"):
            if joined.setdefault(key, results[key]) != results[key]:
                sys.exit(f"{path} was measured with other {key}")
        if joined.setdefault("settings", shared) != shared:
            other = [key for key in shared if joined["settings"].get(key) != shared[key]]
            sys.exit(f"{path} was measured with other settings: {', '.join(other)}")
        joined["runs"][path.parent.name] = {
            "started": results["started"],
            "revision": results["revision"],
            "command": results["command"],
            "temperature": float(results["settings"]["temperature"]),
            "cells": results["cells"],
        }
    joined["geometric_means"] = geometric_means(joined["runs"])
    return joined


def _ratios(runs: dict[str, Any]) -> dict[tuple[str, float, int], list[float]]:
    """Median ratios by contender, temperature and batch size."""
    ratios: dict[tuple[str, float, int], list[float]] = defaultdict(list)
    for run in runs.values():
        for cell in run["cells"]:
            for name, figures in cell["contenders"].items():
                if name != BASELINE and is_complete(cell, name):
                    key = (name, run["temperature"], cell["batch_size"])
                    ratios[key].append(figures["ratio"]["median"])
    return ratios


def geometric_means(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the ratios to no speculation, over the workloads, with the lowest of them."""
    return [
        {
            "contender": name,
            "temperature": temperature,
            "batch_size": batch_size,
            "workloads": len(ratios),
            "geometric_mean": statistics.geometric_mean(ratios),
            "lowest": min(ratios),
        }
        for (name, temperature, batch_size), ratios in sorted(_ratios(runs).items())
    ]


def show(joined: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table("run", "batch", "contender", "gain", "quartiles", "repeated", "equal", box=None)
    for name, run in joined["runs"].items():
        for cell in run["cells"]:
            for contender, figures in cell["contenders"].items():
                if contender == BASELINE:
                    continue
                if not is_complete(cell, contender):
                    table.add_row(name, str(cell["batch_size"]), contender, "failed")
                    continue
                ratio = figures["ratio"]
                equal = f"{figures.get('identical_answers')}/{figures.get('answers')}"
                table.add_row(
                    name,
                    str(cell["batch_size"]),
                    contender,
                    f"{ratio['median']:.2f}",
                    f"{ratio['low']:.2f}-{ratio['high']:.2f}",
                    f"{figures['repeated_share']:.0%}",
                    "" if run["temperature"] else equal,
                )
    means = Table("contender", "T", "batch", "workloads", "geometric mean", "lowest", box=None)
    for mean in joined["geometric_means"]:
        means.add_row(
            mean["contender"],
            f"{mean['temperature']:g}",
            str(mean["batch_size"]),
            str(mean["workloads"]),
            f"{mean['geometric_mean']:.3f}",
            f"{mean['lowest']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print()
    console.print(means)


if __name__ == "__main__":
    main()
