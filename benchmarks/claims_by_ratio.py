"""Verdicts on claims about speed, by the cost of the draft.

    python benchmarks/claims_by_ratio.py --prompts gsm8k_test.jsonl --output claims_by_ratio.json

Four studies have claims whose verdicts depend on what a pass of the draft or the companion costs:
`threshold`, `speedup-by-context`, `gamma` and `companion-choice`. Each is measured with a draft of
a hundredth to a tenth of the target's parameters, and with companions of twice the draft's. The
study `cost-ratio` has the goodput of policies at the same ratios.

Results are written after each ratio, which takes about twelve minutes on two cores. Ratios that the
output file contains are kept.
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
from draftwise.studies.catalogue import study_class
from draftwise.studies.cost_ratio import at_cost_ratio
from draftwise.studies.settings import StudySettings
from draftwise.studies.workbench import Workbench
from draftwise.studies.writing import describe

_STUDIES = ("threshold", "speedup-by-context", "gamma", "companion-choice")
_COMPANIONS = ("zoo:companion",)
_CONTEXTS = (128, 512, 1968)


def measured(bench: Workbench, ratio: float) -> dict[str, Any]:
    """Texts and findings of all studies, with a draft of 1/``ratio`` of the target's parameters."""
    own = at_cost_ratio(bench, ratio)
    found: dict[str, Any] = {"draft": own.settings.draft, "companion": own.settings.companion}
    try:
        for name in _STUDIES:
            study, start = study_class(name)(), time.perf_counter()
            data, description = describe(study, study.measure(own))
            found[name] = {
                "seconds": round(time.perf_counter() - start),
                "text": description.text,
                "findings": [asdict(each) for each in description.findings],
                "data": data,
            }
    finally:
        own.close()
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
    settings = StudySettings(
        tuple(args.prompts),
        models=_COMPANIONS,
        contexts=_CONTEXTS,
        cost_ratios=tuple(args.cost_ratios),
    )
    with console.status("") as status:
        bench = Workbench(settings, status.update)
        for ratio in args.cost_ratios:
            if f"{ratio:g}" in ratios:
                continue
            ratios[f"{ratio:g}"] = measured(bench, ratio)
            write_report(args.output, settings.to_dict(), {"ratios": ratios})
            console.print(f"1/{ratio:g}: written to {args.output}")
    console.print(table(ratios))


if __name__ == "__main__":
    main()
