"""Results as Markdown, and in the page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers

import draftwise

from .verdicts import Result, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_BEGIN, _END = "<!-- coverage: begin -->", "<!-- coverage: end -->"
_TITLES = {
    "causal": "Causal language models",
    "image-text": "Models that also read images or sounds",
    "formats": "Formats of quantised weights",
    "heads": "Drafting heads",
}


def markdown(results: Sequence[Result]) -> str:
    """A table for each kind with a row for each result, grouped by verdict."""
    versions = f"transformers {transformers.__version__}, Draftwise {draftwise.__version__}"
    parts = [f"Printed with {versions}."]
    for kind in dict.fromkeys(each.kind for each in results):
        some = [each for each in results if each.kind == kind]
        count = Counter(each.verdict for each in some)
        numbers = ", ".join(f"{count[each]} {each}" for each in Verdict if count[each])
        parts += [f"### {_TITLES.get(kind, kind)}", f"{len(some)}: {numbers}.", _table(some)]
    return "\n\n".join(parts)


def update_page(results: Sequence[Result], page: Path = PAGE) -> None:
    """Replace the marked section of the page by the results.

    Raises:
        ValueError: the page has no such section.
    """
    text = page.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} has no section between {_BEGIN} and {_END}")
    page.write_text(f"{before}{_BEGIN}\n\n{markdown(results)}\n\n{_END}{after}")


def _table(results: Sequence[Result]) -> str:
    order = list(Verdict)
    rows = [
        f"| `{each.name}` | {each.verdict} | {_cell(each.reason)} |"
        for each in sorted(results, key=lambda each: (order.index(each.verdict), each.name))
    ]
    return "\n".join(["| architecture | verdict | why |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    """A text that Markdown shows as it is."""
    for character in "\\`*_{}[]<>|":
        text = text.replace(character, f"\\{character}")
    return text
