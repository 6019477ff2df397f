"""The page of the studies' results, from what the studies wrote.

    draftwise study all --prompts … -o docs/studies
    python benchmarks/study_page.py docs/studies.md

The head of the page, up to its first section, stays as it is but for the numbers of verdicts. Each
section is a study: its words, its picture, and its statements with a reason for each from
`reasons.json` beside the results. A statement without a reason, or a reason without a statement, is
an error: whoever measures again reads them again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.studies.registry import STUDIES

_REASONS = "reasons.json"
_COUNTED = re.compile(r"Of the statements below .*? do not\.", re.S)


def section(folder: Path, result: dict[str, Any], reasons: list[str]) -> str:
    """One study."""
    name, title = result["study"], result["title"]
    findings = result["findings"]
    if len(findings) != len(reasons):
        raise InvalidParameterError(
            "reasons", f"{len(reasons)} for the {len(findings)} statements of {name!r}"
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
        lines += ["| the source | here | | why |", "|---|---|---|---|"]
        lines += [
            f"| {each['source']} | {each['ours']} | {each['verdict']} | {why} |"
            for each, why in zip(findings, reasons, strict=True)
        ]
        lines.append("")
    return "\n".join(lines)


def page(head: str, folder: Path) -> str:
    """The whole page.

    Args:
        head: what stands before the first section.
        folder: of the results.
    """
    reasons = json.loads((folder / _REASONS).read_text(encoding="utf-8"))
    sections, verdicts = [], Counter[str]()
    for name in STUDIES:
        result = json.loads((folder / name / "data.json").read_text(encoding="utf-8"))
        sections.append(section(folder, result, reasons.get(name, [])))
        verdicts.update(each["verdict"] for each in result["findings"])
    told = (
        f"Of the statements below {verdicts['holds']} hold, {verdicts['holds in part']} hold in "
        f"part and {verdicts['does not hold']} do not."
    )
    head, count = _COUNTED.subn(told, head)
    if count != 1:
        raise InvalidParameterError("page", "its head does not say once how many statements hold")
    return head.rstrip() + "\n\n" + "\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    path = parser.parse_args().page
    head = re.split(r"\n(?=## )", path.read_text(encoding="utf-8"), maxsplit=1)[0]
    path.write_text(page(head, path.with_suffix("")), encoding="utf-8")


if __name__ == "__main__":
    main()
