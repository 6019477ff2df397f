"""Examines which models of the installed ``transformers`` load, and whether they compute the same.

    python -m tools.coverage --kind causal --only llama gpt2
    python -m tools.coverage --json results.jsonl --update-docs

Ends with status 1 if a model gives other tokens or log-probabilities than the modules of
``transformers``, or if loading or computing it fails with anything but a typed error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from .kinds import KINDS, select
from .processes import run
from .report import markdown, update_page
from .verdicts import FAULTS, Result


def main() -> None:
    """Examine what is chosen, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: every kind")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--json", metavar="FILE", help="write one result per line")
    parser.add_argument("--markdown", action="store_true", help="print tables at the end")
    parser.add_argument("--update-docs", action="store_true", help="write them to the page")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--limit", type=float, default=120, metavar="SECONDS", help="for each (default: 120)"
    )
    arguments = parser.parse_args()
    if arguments.update_docs and (arguments.only or arguments.kind):
        parser.error("--update-docs writes the results of everything: leave out --kind and --only")
    try:
        tasks = select(arguments.kind or list(KINDS), arguments.only)
    except ValueError as error:
        parser.error(str(error))
    results: list[Result] = []
    with open(arguments.json or os.devnull, "w") as file:
        for result in run(tasks, arguments.workers, arguments.limit):
            results.append(result)
            print(json.dumps(asdict(result)), file=file, flush=True)
            print(f"{result.kind} {result.name}: {result.verdict}. {result.reason}", flush=True)
    if arguments.markdown:
        print(markdown(results))
    if arguments.update_docs:
        update_page(results)
    faults = [each for each in results if each.verdict in FAULTS]
    for each in faults:
        print(f"\n{each.kind} {each.name}: {each.verdict}\n{each.details}", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
