"""The report of a benchmark as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from draftwise.benchmark.contenders import BASELINE
from draftwise.benchmark.plots import (
    acceptance_figure,
    goodput_figure,
    lengths_figure,
    time_figure,
)
from draftwise.benchmark.repetition import NGRAM_TOKENS


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report.

    Args:
        path: path of the page.
        report: content of ``results.json``.
    """
    environment = Environment(
        loader=PackageLoader("draftwise.benchmark", "templates"),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cells = report["cells"]
    page = environment.get_template("report.html").render(
        report=report,
        findings=findings(report),
        plots={
            "Goodput": goodput_figure(cells),
            "Time by part of a step": time_figure(cells),
            "Acceptance by position": acceptance_figure(cells),
            "Verified lengths": lengths_figure(cells),
        },
        baseline=BASELINE,
        ngram_tokens=NGRAM_TOKENS,
    )
    path.write_text(page, encoding="utf-8")


def findings(report: Mapping[str, Any]) -> list[str]:
    """Summary sentences: the fastest contender of each cell, and its speed-up."""
    sentences = []
    for cell in report["cells"]:
        ratios = {
            name: figures["ratio"]["median"]
            for name, figures in cell["contenders"].items()
            if figures.get("ratio")
        }
        best = max(ratios, key=lambda name: ratios[name])
        where = f"{cell['workload']}, batch {cell['batch_size']}"
        if best == BASELINE:
            sentences.append(f"{where}: no policy was faster than target-only decoding.")
            continue
        sentence = f"{where}: {best} was fastest, {ratios[best]:.2f} times target-only decoding"
        slower = [name for name, ratio in ratios.items() if ratio < 0.97]
        if slower:
            sentence += f"; slower than target-only decoding: {', '.join(slower)}"
        sentences.append(f"{sentence}.")
    return sentences
