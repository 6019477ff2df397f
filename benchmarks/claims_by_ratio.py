"""Verdicts on claims about speed, by the cost of the draft.

    python benchmarks/claims_by_ratio.py --prompts gsm8k_test.jsonl --output claims_by_ratio.json

Four studies have claims whose verdicts depend on what a pass of the draft or the companion costs:
`threshold`, `speedup-by-context`, `gamma` and `companion-choice`. Each is measured with a draft of
a hundredth to a tenth of the target's parameters, and with companions of twice the draft's. The
study `cost-ratio` has the goodput of policies at the same ratios.

Results are written after each ratio. Ratios that the output file contains are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwise.benchmark.report import write_report
from draftwise.studies.cost_ratio import COMPANION_SIZE, inflated
from draftwise.studies.registry import study_class
from draftwise.studies.settings import StudySettings
from draftwise.studies.workbench import Workbench

_STUDIES = ("threshold", "speedup-by-context", "gamma", "companion-choice")
_TARGET, _DRAFT, _COMPANION = "zoo:target@200m", "zoo:draft", "zoo:companion"
_OTHER_COMPANIONS = ("zoo:mid", "zoo:spare")
_TARGET_PARAMETERS = 200e6


def measured(prompts: tuple[Path, ...], ratio: float, console: Console) -> dict[str, Any]:
    """Texts and findings of all studies, with a draft of 1/``ratio`` of the target's parameters."""
    draft_size = _TARGET_PARAMETERS / ratio
    draft = inflated(_DRAFT, draft_size)
    companion, *others = (
        inflated(name, COMPANION_SIZE * draft_size) for name in (_COMPANION, *_OTHER_COMPANIONS)
    )
    settings = StudySettings(
        prompts,
        _TARGET,
        draft,
        companion,
        (companion, *others),
        contexts=(128, 512, 1968),
    )
    found: dict[str, Any] = {"draft": draft, "companion": companion}
    with console.status("") as status:
        bench = Workbench(settings, status.update)
        try:
            for name in _STUDIES:
                study, start = study_class(name)(), time.perf_counter()
                data = json.loads(json.dumps(study.measure(bench)))
                description = study.describe(data)
                found[name] = {
                    "seconds": round(time.perf_counter() - start),
                    "text": description.text,
                    "findings": [asdict(each) for each in description.findings],
                    "data": data,
                }
        finally:
            bench.close()
    return found


def table(ratios: dict[str, Any]) -> Table:
    """The verdict on each claim, by ratio."""
    shown = Table(title="verdicts by cost ratio")
    shown.add_column("study")
    shown.add_column("claim")
    for ratio in ratios:
        shown.add_column(f"1/{ratio}")
    first = next(iter(ratios.values()))
    for name in _STUDIES:
        for number, finding in enumerate(first[name]["findings"]):
            verdicts = [each[name]["findings"][number]["verdict"] for each in ratios.values()]
            shown.add_row(name, finding["source"], *verdicts)
    return shown


def main() -> None:
    """Measure all ratios, write the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--cost-ratios", nargs="+", type=float, default=[100, 40, 20, 10])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    console = Console(highlight=False)
    ratios: dict[str, Any] = {}
    if args.output.exists():
        ratios = json.loads(args.output.read_text(encoding="utf-8"))["ratios"]
    for ratio in args.cost_ratios:
        if f"{ratio:g}" in ratios:
            continue
        ratios[f"{ratio:g}"] = measured(tuple(args.prompts), ratio, console)
        write_report(
            args.output, {"prompts": [each.name for each in args.prompts]}, {"ratios": ratios}
        )
        console.print(f"1/{ratio:g}: written to {args.output}")
    console.print(table(ratios))


if __name__ == "__main__":
    main()
