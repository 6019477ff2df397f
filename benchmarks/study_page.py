"""Generate the documentation page of the studies from their results.

    draftwise study all --prompts … -o docs/studies
    python benchmarks/study_page.py docs/studies.md

The head of the page, up to a comment, is kept, and its counts of verdicts are updated. Each section
is a table of the claims of one source. The first row of a study links to its figure. A claim
has the remark of `reasons.json` in the results folder after its measurement, unless that is empty.
Studies without results are left out. The numbers of claims and remarks must match, so that the
remarks are reviewed after new measurements.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.studies.catalogue import STUDIES

_REASONS = "reasons.json"
# Separates the head of the page from its tables.
_TABLES = "<!-- tables of the studies -->"
_COUNTED = re.compile(r"Of the claims below .*? do not\.", re.S)


def rows(folder: Path, result: dict[str, Any], reasons: Sequence[str]) -> list[str]:
    """The rows of one study."""
    name, findings = result["study"], result["findings"]
    if len(findings) != len(reasons):
        raise InvalidParameterError(
            "reasons", f"{len(reasons)} reasons for {len(findings)} claims of {name!r}"
        )
    first = f"[`{name}`]({folder.name}/{name}/figure.svg) "
    lines = []
    for each, reason in zip(findings, reasons, strict=True):
        measured = f"{each['ours']}. {reason}" if reason else each["ours"]
        lines.append(f"| {first}| {each['source']} | {measured} | {each['verdict']} |")
        first = ""
    return lines


def page(head: str, folder: Path) -> str:
    """The whole page.

    Args:
        head: text before the first section.
        folder: folder of the results.
    """
    reasons = json.loads((folder / _REASONS).read_text(encoding="utf-8"))
    files = [folder / name / "data.json" for name in STUDIES]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    verdicts = Counter(each["verdict"] for result in results for each in result["findings"])
    counted = (
        f"Of the claims below {verdicts['holds']} hold, {verdicts['holds in part']} hold in part "
        f"and {verdicts['does not hold']} do not."
    )
    head, count = _COUNTED.subn(counted, head)
    if count != 1:
        raise InvalidParameterError("page", "must state the counts of verdicts once in its head")
    lines = [head.rstrip(), "", _TABLES, ""]
    for source, group in groupby(results, lambda result: result["source"]):
        title = "Draftwise's own" if source == "this project" else source[0].upper() + source[1:]
        lines += [f"## {title}", ""]
        lines += ["| study | claim | measured here | verdict |", "|---|---|---|---|"]
        for result in group:
            lines += rows(folder, result, reasons.get(result["study"], []))
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    path = parser.parse_args().page
    head = path.read_text(encoding="utf-8").split(_TABLES)[0]
    path.write_text(page(head, path.with_suffix("")), encoding="utf-8")


if __name__ == "__main__":
    main()
