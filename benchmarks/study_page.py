"""Generate the documentation page of the studies from their results.

    draftwise study all --prompts … -o docs/studies
    python benchmarks/study_page.py docs/studies.md

The head of the page, up to its first section, is kept, and its counts of verdicts are updated. Each
section has the text and the figure of a study, and its claims with a reason for each from
`reasons.json` in the results folder. Studies without results are left out. The numbers of claims
and reasons must match, so that the
reasons are reviewed after new measurements.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.studies.catalogue import STUDIES

_REASONS = "reasons.json"
_COUNTED = re.compile(r"Of the statements below .*? do not\.", re.S)


def section(folder: Path, result: dict[str, Any], reasons: list[str]) -> str:
    """The section of one study."""
    name, title = result["study"], result["title"]
    findings = result["findings"]
    if len(findings) != len(reasons):
        raise InvalidParameterError(
            "reasons", f"{len(reasons)} reasons for {len(findings)} claims of {name!r}"
        )
    lines = [
        f"## {title}",
        "",
        f"`{name}`, after {result['source']}; {result['seconds']:.0f} s, "
        f"revision {result['revision']}.",
        "",
        result["text"],
        "",
        f"![{title}]({folder.name}/{name}/figure.svg)",
        "",
    ]
    if findings:
        lines += ["| source | measured here | verdict | reason |", "|---|---|---|---|"]
        lines += [
            f"| {each['source']} | {each['ours']} | {each['verdict']} | {why} |"
            for each, why in zip(findings, reasons, strict=True)
        ]
        lines.append("")
    return "\n".join(lines)


def page(head: str, folder: Path) -> str:
    """The whole page.

    Args:
        head: text before the first section.
        folder: folder of the results.
    """
    reasons = json.loads((folder / _REASONS).read_text(encoding="utf-8"))
    sections, verdicts = [], Counter[str]()
    for name in STUDIES:
        file = folder / name / "data.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text(encoding="utf-8"))
        sections.append(section(folder, result, reasons.get(name, [])))
        verdicts.update(each["verdict"] for each in result["findings"])
    counted = (
        f"Of the statements below {verdicts['holds']} hold, {verdicts['holds in part']} hold in "
        f"part and {verdicts['does not hold']} do not."
    )
    head, count = _COUNTED.subn(counted, head)
    if count != 1:
        raise InvalidParameterError("page", "must state the counts of verdicts once in its head")
    return head.rstrip() + "\n\n" + "\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    path = parser.parse_args().page
    head = re.split(r"\n(?=## )", path.read_text(encoding="utf-8"), maxsplit=1)[0]
    path.write_text(page(head, path.with_suffix("")), encoding="utf-8")


if __name__ == "__main__":
    main()
